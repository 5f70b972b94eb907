#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace ours {

/// What a process says of itself to those that may become ranks of one group with it, in c10d's reconfigure().
struct ReconfigureHandle {
  /// Throws ValueError if the text is not a handle of this backend.
  static ReconfigureHandle parse(const std::string& text);
  std::string text() const;

  /// No other handle in any process has it, and it stays the same for as long as the group lives.
  std::string id = random_id();
  bool joined = false;          ///< whether the group has had ranks
  std::optional<int64_t> uuid;  ///< of the last reconfigure() that has succeeded
  int rank = 0;                 ///< in the ranks that the group has, or as the program numbered it before it had any

 private:
  static std::string random_id();
};

/// Puts handles into the order of the ranks where a program leaves that to the backend: those that have been ranks
/// before newcomers, so that rank 0 has what newcomers lack, and each of both in the order of their last ranks.
std::vector<ReconfigureHandle> in_order(std::vector<ReconfigureHandle> handles);

/// Throws ValueError if there is none, or one is there twice.
void check_members(const std::vector<ReconfigureHandle>& handles);

}  // namespace ours
