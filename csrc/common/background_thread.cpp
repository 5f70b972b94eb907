#include "common/background_thread.h"

#include <pthread.h>
#include <signal.h>

#include <thread>

namespace ours {

namespace {

/// Blocks all signals of this thread while it lives; new threads inherit that.
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

}  // namespace ours
