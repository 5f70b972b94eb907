#pragma once

#include <future>
#include <thread>
#include <utility>

#include "common/deadline.h"

namespace ours::mpi {

/// Runs `call`, which may never return, in a thread of its own. Returns whether it has returned before the deadline,
/// and throws what it throws. `call` must own what it uses.
template <class Call>
bool wait_for(Call call, Deadline deadline) {
  std::packaged_task<void()> task(std::move(call));
  std::future<void> end = task.get_future();
  std::thread(std::move(task)).detach();
  if (end.wait_until(deadline.at()) != std::future_status::ready) return false;
  end.get();
  return true;
}

}  // namespace ours::mpi
