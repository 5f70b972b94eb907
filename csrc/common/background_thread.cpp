#include "common/background_thread.h"

#include <pthread.h>
#include <signal.h>

#include <condition_variable>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>

namespace ours {

namespace {

/// Blocks all signals for this thread while it exists; new threads inherit that.
class SignalsBlocked {
 public:
  SignalsBlocked() {
    sigset_t all;
    ::sigfillset(&all);
    ::pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  ~SignalsBlocked() { ::pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  SignalsBlocked(const SignalsBlocked&) = delete;
  SignalsBlocked& operator=(const SignalsBlocked&) = delete;

 private:
  sigset_t before_;
};

}  // namespace

void start_background_thread(const char* name, std::function<void()> body) {
  const SignalsBlocked blocked;
  std::thread([name, body = std::move(body)] {
    ::pthread_setname_np(::pthread_self(), name);
    body();
  }).detach();
}

bool ends_in_background(const char* name, std::function<void()> body, std::chrono::milliseconds patience) {
  struct End {
    std::mutex mutex;
    std::condition_variable came;
    bool has_come = false;
  };
  const auto end = std::make_shared<End>();
  start_background_thread(name, [end, body = std::move(body)]() mutable {
    body();
    body = nullptr;
    const std::lock_guard<std::mutex> lock(end->mutex);
    end->has_come = true;
    end->came.notify_all();
  });
  std::unique_lock<std::mutex> lock(end->mutex);
  return end->came.wait_for(lock, patience, [&] { return end->has_come; });
}

}  // namespace ours
