#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "common/fork_guard.h"
#include "common/owning_process.h"
#include "common/shared_memory.h"

namespace ours {

/// A piece of memory that other processes of the node can map. It lasts until nobody maps it any more, whoever made it.
/// What a forked child has of it is the child's own.
class SymmetricBlock final : private SharedWithOthers {
 public:
  /// Where another process finds a block.
  struct Place {
    uint64_t bytes;
    uint64_t nonce;
    int32_t pid;
    int32_t fd;
  };

  /// Makes a block of zeros. Throws SystemError if there is no memory for it.
  static std::shared_ptr<SymmetricBlock> make(size_t bytes);

  /// Maps the block of another process. Throws Error if it is not there.
  static std::shared_ptr<SymmetricBlock> open(const Place& place);

  SymmetricBlock(const SymmetricBlock&) = delete;
  SymmetricBlock& operator=(const SymmetricBlock&) = delete;
  ~SymmetricBlock();

  /// Aligned to a page.
  std::byte* data() const;
  size_t bytes() const { return place_.bytes; }

  /// Valid as long as this process has the block.
  Place place() const { return place_; }

  /// False in a forked child of the process that made or opened it.
  bool is_here() const { return owner_.is_here(); }

 private:
  SymmetricBlock(std::shared_ptr<SharedMemory> memory, const Place& place);
  void keep_to_oneself() noexcept override;

  const std::shared_ptr<SharedMemory> memory_;
  const Place place_;
  const OwningProcess owner_;
};

}  // namespace ours
