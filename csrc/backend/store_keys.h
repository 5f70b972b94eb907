#pragma once

#include <map>
#include <mutex>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

#include "transport/key_values.h"

namespace ours {

/// Keys with a prefix in a c10d store. What the store itself throws arrives as Error, time that is up as TimeoutError.
class StoreKeys final : public KeyValues {
 public:
  using StorePtr = c10::intrusive_ptr<c10d::Store>;

  StoreKeys(StorePtr store, std::string prefix) : store_(std::move(store)), prefix_(std::move(prefix)) {}

  void set(const std::string& key, const std::string& value) override;
  std::string get(const std::string& key, Deadline deadline) override;

  /// The values of several keys, once all are there.
  std::vector<std::string> get_all(const std::vector<std::string>& keys, Deadline deadline);

  /// Sets the key unless somebody has. Returns the value that it has then.
  std::string claim(const std::string& key, const std::string& value);

  bool has(const std::string& key);

  /// Fetches keys that are there, so that get() need not ask the store: others may occupy it for long, or it may be
  /// gone by then.
  void fetch(const std::vector<std::string>& keys, Deadline deadline);

 private:
  void wait(const std::vector<std::string>& keys, Deadline deadline);

  const StorePtr store_;
  const std::string prefix_;
  std::mutex mutex_;
  std::map<std::string, std::string> fetched_;  // guarded by mutex_
};

/// Under which name or address the ranks of a job reach its store; empty where it is no server.
std::string host_of(const c10::intrusive_ptr<c10d::Store>& store);

}  // namespace ours
