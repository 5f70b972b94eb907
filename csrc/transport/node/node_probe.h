#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "common/shared_memory.h"

namespace ours {

/// A little memory of this process, by which others find out whether they share memory with it. Ranks that look alike
/// (see node_identity()) need not: another user's processes may not be looked into, for one.
class NodeProbe {
 public:
  /// Throws SystemError where no memory can be had.
  NodeProbe();

  /// Where the memory is, and the random number in it: one line of printable text.
  std::string address() const;

  /// Why this process does not share memory with the one whose address() that is; empty where it does, which is proved
  /// by the number: it was found in that memory.
  static std::string obstacle(const std::string& address);

 private:
  std::shared_ptr<SharedMemory> memory_;
};

}  // namespace ours
