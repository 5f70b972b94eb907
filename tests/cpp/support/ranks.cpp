#include "support/ranks.h"

#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <thread>

namespace ours::testing {

std::vector<std::exception_ptr> run_ranks_catching(int n, const std::function<void(int)>& fn) {
  constexpr std::chrono::seconds kLimit{120};
  std::vector<std::exception_ptr> errors(static_cast<size_t>(n));
  std::vector<bool> done(static_cast<size_t>(n), false);
  int running = n;
  std::mutex mutex;
  std::condition_variable changed;
  std::vector<std::thread> threads;
  for (int rank = 0; rank < n; ++rank) {
    threads.emplace_back([&, rank] {
      std::exception_ptr error;
      try {
        fn(rank);
      } catch (...) {
        error = std::current_exception();
      }
      std::lock_guard<std::mutex> lock(mutex);
      errors[static_cast<size_t>(rank)] = error;
      done[static_cast<size_t>(rank)] = true;
      --running;
      changed.notify_all();
    });
  }
  {
    // wait_until on the system clock, because ThreadSanitizer of older compilers does not know the steady clock's wait.
    std::unique_lock<std::mutex> lock(mutex);
    if (!changed.wait_until(lock, std::chrono::system_clock::now() + kLimit, [&] { return running == 0; })) {
      std::fprintf(stderr, "run_ranks: still running after %lld s: ranks", static_cast<long long>(kLimit.count()));
      for (int rank = 0; rank < n; ++rank) {
        if (!done[static_cast<size_t>(rank)]) std::fprintf(stderr, " %d", rank);
      }
      std::fprintf(stderr, " of %d\n", n);
      std::abort();
    }
  }
  for (auto& thread : threads) thread.join();
  return errors;
}

std::string message_of(const std::exception_ptr& error) {
  if (!error) return "";
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& e) {
    return e.what();
  } catch (...) {
    return "(not a std::exception)";
  }
}

void run_ranks(int n, const std::function<void(int)>& fn) {
  const auto errors = run_ranks_catching(n, fn);
  std::string messages;
  for (size_t rank = 0; rank < errors.size(); ++rank) {
    if (errors[rank]) messages += "\n    rank " + std::to_string(rank) + ": " + message_of(errors[rank]);
  }
  if (!messages.empty()) throw Failure("of " + std::to_string(n) + " ranks failed:" + messages);
}

void wait_until(const std::function<bool()>& state) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::minutes(1);
  while (!state()) {
    if (std::chrono::steady_clock::now() > end) throw Failure("waited for a minute in vain");
    std::this_thread::yield();
  }
}

}  // namespace ours::testing
