#include "backend/device/device_transfers.h"

#include <set>

#include "common/background_thread.h"
#include "common/deadline.h"

namespace ours {

namespace {

/// How often the device is queried while something waits for it.
constexpr std::chrono::microseconds kPoll{50};

using HeldUp = std::set<DeviceTransferWork::Destination>;

/// Whether the wait of `work` has ended; `error` tells how. `held_up` are the sends before it that still wait.
bool is_over(DeviceTransferWork& work, HeldUp& held_up, std::exception_ptr& error) {
  const std::optional<DeviceTransferWork::Destination> to = work.destination();
  try {
    if (work.may_go_on(to && held_up.count(*to) > 0)) return true;
  } catch (...) {
    error = std::current_exception();
    return true;
  }
  if (to) held_up.insert(*to);
  return false;
}

}  // namespace

void DeviceTransfers::add(WorkPtr work) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!running_) start_background_thread("ours_transfer", [self = shared_from_this()] { self->run(); });
  running_ = true;
  added_.push_back(std::move(work));
  changed_.notify_all();
}

void DeviceTransfers::close() noexcept {
  std::lock_guard<std::mutex> lock(mutex_);
  closed_ = true;
  changed_.notify_all();
}

void DeviceTransfers::wait_closed(std::chrono::milliseconds limit) {
  std::unique_lock<std::mutex> lock(mutex_);
  if (thread_ == std::this_thread::get_id()) return;
  changed_.wait_until(lock, Deadline::after(limit).at(), [&] { return !running_; });
}

void DeviceTransfers::run() {
  std::list<WorkPtr> copying;
  while (take_added(copying)) {
    HeldUp held_up;
    for (auto next = copying.begin(); next != copying.end();) {
      std::exception_ptr error;
      if (!is_over(**next, held_up, error)) {
        ++next;
        continue;
      }
      const WorkPtr work = std::move(*next);
      next = copying.erase(next);
      work->go_on(error);
    }
  }
}

bool DeviceTransfers::take_added(std::list<WorkPtr>& copying) {
  std::unique_lock<std::mutex> lock(mutex_);
  thread_ = std::this_thread::get_id();
  const auto has_news = [&] { return !added_.empty() || closed_; };
  if (copying.empty()) {
    changed_.wait(lock, has_news);
  } else {
    changed_.wait_for(lock, kPoll, [&] { return !added_.empty(); });
  }
  copying.splice(copying.end(), added_);
  running_ = !copying.empty();
  if (!running_) changed_.notify_all();
  return running_;
}

}  // namespace ours
