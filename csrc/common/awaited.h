#pragma once

#include <string>

// A rank may be late to one group because it waits for a rank of another one. It says so when it is asked where it is
// (see whereabouts.h), so that the error names the rank that keeps both waiting.

namespace ours {

/// The ranks for which a call of this process waits, for as long as it lives. Used by one thread.
class Awaited {
 public:
  Awaited() = default;
  Awaited(const Awaited&) = delete;
  Awaited& operator=(const Awaited&) = delete;
  ~Awaited() {
    if (!whom_.empty()) set("");
  }

  /// `whom`: "rank 1 (host node1, pid 4711), rank 2 (...)"; empty: nobody.
  void set(const std::string& whom) noexcept;

 private:
  std::string whom_;
};

/// "; it waits for rank 1 (host node1, pid 4711)" for all calls that wait now. Thread-safe.
std::string describe_awaited();

}  // namespace ours
