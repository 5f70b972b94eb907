#include "support/stand_in_stream.h"

#include <utility>

namespace ours::testing {

void StandInState::check(const char* call) {
  check_alive();
  pause(call);
}

void StandInState::pause(const char* call) {
  std::unique_lock<std::mutex> lock(mutex_);
  if (call_ != call) return;
  const std::function<void()> what = before_call_;
  lock.unlock();
  what();
}

void StandInState::check_alive() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!failure_.empty()) throw DeviceError(failure_);
}

void StandInState::before(std::string call, std::function<void()> what) {
  const std::lock_guard<std::mutex> lock(mutex_);
  call_ = std::move(call);
  before_call_ = std::move(what);
}

void StandInState::fail(std::string why) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (failure_.empty()) failure_ = std::move(why);
}

StandInQueue::StandInQueue(std::shared_ptr<StandInState> state)
    : state_(std::move(state)), thread_([this] { run(); }) {}

StandInQueue::~StandInQueue() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    ending_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

void StandInQueue::push(std::function<void()> work) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    work_.push_back(std::move(work));
  }
  changed_.notify_all();
}

bool StandInQueue::idle() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return work_.empty() && !busy_;
}

void StandInQueue::run() {
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    changed_.wait(lock, [&] { return ending_ || !work_.empty(); });
    if (work_.empty()) return;
    std::function<void()> next = std::move(work_.front());
    work_.pop_front();
    busy_ = true;
    lock.unlock();
    try {
      next();
    } catch (const std::exception& e) {
      state_->fail(std::string("work on the stand-in device failed: ") + e.what());
    }
    next = nullptr;  // this thread drops what it refers to, but not while the queue is locked
    lock.lock();
    busy_ = false;
  }
}

void StandInPoint::reach() {
  const std::lock_guard<std::mutex> lock(mutex_);
  reached_ = true;
  changed_.notify_all();  // with the lock: who waits may drop this object as soon as it has it
}

bool StandInPoint::reached() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return reached_;
}

void StandInPoint::wait() {
  std::unique_lock<std::mutex> lock(mutex_);
  awaited_ = true;
  changed_.wait(lock, [&] { return reached_; });
}

bool StandInPoint::awaited() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return awaited_;
}

}  // namespace ours::testing
