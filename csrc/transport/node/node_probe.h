#pragma once

#include <memory>
#include <string>

#include "common/shared_memory.h"

namespace ours {

/// A little memory of this process, by which others find out whether they share memory with it. Ranks with the same
/// node_identity() need not share memory: another user's processes, for example, may not be read.
class NodeProbe {
 public:
  /// Throws SystemError if no memory can be had.
  NodeProbe();

  /// The address of the memory and the random number in it, as one line of printable text.
  std::string address() const;

  /// The reason why this process does not share memory with the one that has this address(). Empty if it does, which
  /// is proved by finding the number in that memory.
  static std::string obstacle(const std::string& address);

 private:
  std::shared_ptr<SharedMemory> memory_;
};

}  // namespace ours
