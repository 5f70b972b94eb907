#pragma once

#include <atomic>
#include <map>
#include <mutex>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

#include "transport/key_values.h"

namespace ours {

using StorePtr = c10::intrusive_ptr<c10d::Store>;

/// Asks a store on a thread of its own, since it may never answer: the process that serves it may be stopped, or its
/// machine gone. `question` gets the store, and a flag that says that nobody waits for the answer any more. What the
/// store throws arrives as Error. Throws TimeoutError after the deadline, and Error where a signal handler raised
/// something meanwhile; calls `look_around`, if there is one, about every 50 ms, which may throw to end the wait.
void ask_store(const StorePtr& store, Deadline deadline, const std::function<void()>& look_around,
               std::function<void(c10d::Store&, const std::atomic<bool>&)> question);

/// The same store over a connection of its own: what waits in one holds up others of its connection.
StorePtr connect_anew(const StorePtr& store, Deadline deadline);

/// Keys with a prefix in a c10d store. What the store itself throws arrives as Error, time that is up as TimeoutError.
/// No call takes longer than its deadline, or that of all, whatever the store does.
class StoreKeys final : public KeyValues {
 public:
  struct Terms {
    Deadline deadline;  ///< for what nobody else has to do anything
    /// Called while a key is waited for, on another thread than the caller's; throws where it will never come.
    std::function<void(c10d::Store&)> check;
    std::chrono::milliseconds pause;  ///< between two looks for a key, at most
  };

  StoreKeys(StorePtr store, std::string prefix, Terms terms)
      : store_(std::move(store)), prefix_(std::move(prefix)), terms_(std::move(terms)) {}

  void set(const std::string& key, const std::string& value) override;
  std::string get(const std::string& key, Deadline deadline) override;
  std::string await(const std::string& key, Deadline deadline, const std::function<void()>& look_around) override;

  /// The values of several keys, once all are there.
  std::vector<std::string> get_all(const std::vector<std::string>& keys, Deadline deadline,
                                   const std::function<void()>& look_around = {});

  /// Sets the key unless somebody has. Returns the value that it has then.
  std::string claim(const std::string& key, const std::string& value, Deadline deadline);

  /// Which of the keys nobody has set, at most `most` of them.
  std::vector<size_t> missing(const std::vector<std::string>& keys, size_t most, Deadline deadline);

  /// Fetches keys that are there, so that get() need not ask the store: others may occupy it for long, or it may be
  /// gone by then.
  void fetch(const std::vector<std::string>& keys, Deadline deadline);

 private:
  /// What fetch() has of the key, or an empty string.
  std::string known(const std::string& key);

  const StorePtr store_;
  const std::string prefix_;
  const Terms terms_;
  std::mutex mutex_;
  std::map<std::string, std::string> fetched_;  // guarded by mutex_
};

/// Under which name or address the ranks of a job reach its store; empty where it is no server.
std::string host_of(const StorePtr& store);

}  // namespace ours
