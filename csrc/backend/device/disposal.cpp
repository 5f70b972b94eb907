#include "backend/device/disposal.h"

#include <exception>

#include "common/background_thread.h"
#include "common/deadline.h"

namespace ours {

namespace {

thread_local const Disposal* t_serves = nullptr;

}  // namespace

void Disposal::drop(std::function<void()> what) noexcept {
  try {
    const Lock lock(mutex_);
    if (!running_) start_background_thread("ours_drop", [self = shared_from_this()] { self->run(); });
    running_ = true;
    dropped_.push_back(std::move(what));
    changed_.notify_all();
  } catch (const std::exception&) {
    // There can be no more threads, or there is no memory: it goes here and now.
  }
}

void Disposal::close() noexcept {
  const Lock lock(mutex_);
  closed_ = true;
  changed_.notify_all();
}

void Disposal::wait_idle(std::chrono::milliseconds limit) {
  if (t_serves == this) return;
  Lock lock(mutex_);
  changed_.wait_until(lock, Deadline::after(limit).at(), [&] { return dropped_.empty() && !busy_; });
}

void Disposal::run() {
  t_serves = this;
  Lock lock(mutex_);
  while (!dropped_.empty() || !closed_) {
    if (dropped_.empty()) {
      changed_.wait(lock);
      continue;
    }
    std::vector<std::function<void()>> dropped;
    dropped.swap(dropped_);
    busy_ = true;
    lock.unlock();
    // One by one from the first: a vector need not.
    for (std::function<void()>& one : dropped) one = nullptr;
    lock.lock();
    busy_ = false;
    changed_.notify_all();
  }
  running_ = false;
}

}  // namespace ours
