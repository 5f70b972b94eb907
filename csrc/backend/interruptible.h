#pragma once

#include <algorithm>
#include <condition_variable>
#include <mutex>
#include <string>

#include "common/deadline.h"
#include "common/interrupts.h"

namespace ours {

/// Waits until `ended` holds or the deadline has passed. Signal handlers run meanwhile, without the lock. If one of
/// them raises, returns the exception's name, and throw_interrupt() throws the exception. Otherwise returns an empty
/// string.
template <class Ended>
std::string await_interruptibly(std::condition_variable& condition, std::unique_lock<std::mutex>& lock,
                                Deadline deadline, Ended&& ended) {
  Interrupts interrupts;
  std::string raised;
  while (raised.empty() && !deadline.passed() &&
         !condition.wait_until(lock, std::min(deadline.at(), Clock::now() + Interrupts::kBetweenLooks), ended)) {
    lock.unlock();
    raised = interrupts.look();
    lock.lock();
  }
  return raised;
}

}  // namespace ours
