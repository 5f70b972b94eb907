#include "device/stream_filler.h"

#include <condition_variable>
#include <exception>
#include <mutex>
#include <utility>

#include "common/background_thread.h"

namespace ours {

struct StreamFiller::State {
  std::mutex mutex;
  std::condition_variable has_ended;
  int given = 0;
  bool stopped = false;
  bool ended = false;
  std::exception_ptr error;

  void run(int times, const std::function<void()>& give) {
    std::unique_lock<std::mutex> lock(mutex);
    try {
      while (given < times && !stopped) {
        lock.unlock();
        give();
        lock.lock();
        ++given;
      }
    } catch (...) {
      lock.lock();
      error = std::current_exception();
    }
  }

  void end() {
    const std::lock_guard<std::mutex> lock(mutex);
    ended = true;
    has_ended.notify_all();
  }
};

StreamFiller::StreamFiller(int times, std::function<void()> give) : state_(std::make_shared<State>()) {
  if (times == 0) {
    state_->ended = true;
    return;
  }
  start_background_thread("ours_filler", [state = state_, times, give = std::move(give)]() mutable {
    state->run(times, give);
    give = nullptr;
    state->end();
  });
}

StreamFiller::~StreamFiller() {
  const std::lock_guard<std::mutex> lock(state_->mutex);
  state_->stopped = true;
}

void StreamFiller::wait_until_it_stands(std::chrono::milliseconds patience) {
  std::unique_lock<std::mutex> lock(state_->mutex);
  int before = -1;
  for (int i = 0; i < 3 && before != state_->given; ++i) {
    before = state_->given;
    if (state_->has_ended.wait_for(lock, patience, [&] { return state_->ended; })) return;
  }
}

int StreamFiller::given() const {
  const std::lock_guard<std::mutex> lock(state_->mutex);
  return state_->given;
}

bool StreamFiller::stop(std::chrono::milliseconds patience) {
  std::unique_lock<std::mutex> lock(state_->mutex);
  state_->stopped = true;
  const bool ended = state_->has_ended.wait_for(lock, patience, [&] { return state_->ended; });
  if (state_->error) std::rethrow_exception(state_->error);
  return ended;
}

}  // namespace ours
