#pragma once

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <type_traits>
#include <utility>
#include <vector>

#include "common/error.h"
#include "transport/key_values.h"

namespace ours {

using StorePtr = c10::intrusive_ptr<c10d::Store>;

/// A deadline passed while the store did not answer at all, so that nothing is known of other ranks.
class StoreSilent final : public TimeoutError {
 public:
  using TimeoutError::TimeoutError;
};

/// Runs `question` on a thread of its own: ask_store() without an answer.
void run_inquiry(const StorePtr& store, Deadline deadline, const std::function<void()>& look_around,
                 std::function<void(c10d::Store&, const std::atomic<bool>&)> question);

/// Asks a store on a thread of its own, since its server may be stopped or gone, and returns the answer of `question`.
/// That gets the store, and a flag that is set when the answer is not needed any more. Throws Error if the store fails
/// or a signal handler raises something, and StoreSilent after the deadline. `look_around` is called about every 50
/// ms, and may throw to end the wait.
template <class Question>
auto ask_store(const StorePtr& store, Deadline deadline, Question question,
               const std::function<void()>& look_around = {}) {
  using Dropped = const std::atomic<bool>&;
  using Answer = std::invoke_result_t<Question&, c10d::Store&, Dropped>;
  if constexpr (std::is_void_v<Answer>) {
    run_inquiry(store, deadline, look_around, std::move(question));
  } else {
    // Shared, since the question may outlive this call.
    const auto answer = std::make_shared<Answer>();
    run_inquiry(store, deadline, look_around,
                [answer, question = std::move(question)](c10d::Store& asked, Dropped dropped) {
                  *answer = question(asked, dropped);
                });
    return *answer;
  }
}

/// The values of keys that are set, in one request if the store supports that.
std::vector<std::string> values_in(c10d::Store& store, const std::vector<std::string>& names);

/// The same store over a connection of its own, since a wait holds up everything else on its connection.
StorePtr connect_anew(const StorePtr& store, Deadline deadline);

/// Keys with a prefix in a c10d store. Failures of the store are thrown as Error, and TimeoutError after a deadline: no
/// call takes longer than its own deadline, or that of the terms, whatever the store does.
class StoreKeys final : public KeyValues {
 public:
  struct Terms {
    Deadline deadline;  ///< for calls that wait for no other rank
    /// Called while a key is waited for, on another thread than the caller's; throws if it will never be set.
    std::function<void(c10d::Store&)> check;
    std::chrono::microseconds pause;  ///< the longest one between two checks for a key; the first is a hundredth of it
  };

  StoreKeys(StorePtr store, std::string prefix, Terms terms)
      : store_(std::move(store)), prefix_(std::move(prefix)), terms_(std::move(terms)) {}

  void set(const std::string& key, const std::string& value) override;
  std::string get(const std::string& key, Deadline deadline) override;
  std::string await(const std::string& key, Deadline deadline, const std::function<void()>& look_around) override;

  /// The values of several keys, once all of them are set.
  std::vector<std::string> get_all(const std::vector<std::string>& keys, Deadline deadline,
                                   const std::function<void()>& look_around = {});

  /// Sets the key if it is not set. Returns the value that it has now.
  std::string claim(const std::string& key, const std::string& value, Deadline deadline);

  /// The indices of keys that are not set, at most `most` of them.
  std::vector<size_t> missing(const std::vector<std::string>& keys, size_t most, Deadline deadline);

  /// Fetches keys that are set, so that get() need not ask the store, which may be busy or gone by then.
  void fetch(const std::vector<std::string>& keys, Deadline deadline);
  std::string known(const std::string& key) override;

 private:
  const StorePtr store_;
  const std::string prefix_;
  const Terms terms_;
  std::mutex mutex_;
  std::map<std::string, std::string> fetched_;  // guarded by mutex_
};

/// The name or address under which the ranks of a job reach its store; empty if no server serves it.
std::string host_of(const StorePtr& store);

}  // namespace ours
