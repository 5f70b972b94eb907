#include "reducer/gradient_memory.h"

#include <algorithm>
#include <mutex>
#include <utility>

namespace ours {

using c10::DataPtr;
using MemoryPtr = std::shared_ptr<GradientMemory>;

namespace {

/// The number of blocks of each size beyond the gradients, for tensors that live for a moment before a gradient of
/// their size comes.
constexpr size_t kSpareBlocks = 1;

using Lock = std::unique_lock<std::mutex>;

}  // namespace

MemoryPtr GradientMemory::create(std::shared_ptr<c10::Allocator> source, const std::vector<size_t>& sizes,
                                 size_t most_spare_bytes) {
  install_lending_allocator();
  return MemoryPtr(new GradientMemory(std::move(source), sizes, most_spare_bytes));
}

GradientMemory::GradientMemory(std::shared_ptr<c10::Allocator> source, const std::vector<size_t>& sizes,
                               size_t most_spare_bytes)
    : source_(std::move(source)), most_spare_bytes_(most_spare_bytes) {
  for (const size_t bytes : sizes) ++blocks_[bytes].gradients;
}

bool GradientMemory::may_lend(const Blocks& blocks, size_t bytes) const {
  // A block that would not be kept when it returns is cheaper from the ordinary allocator.
  const bool spare = blocks.kept.empty() && blocks.all >= blocks.gradients;
  return open_ && !released_ && blocks.lent < blocks.lent_before + blocks.gradients + kSpareBlocks &&
         (!spare || spare_bytes_ + bytes <= most_spare_bytes_) && owner_.is_here();
}

void GradientMemory::forget(Blocks& blocks, size_t bytes) {
  if (blocks.all-- > blocks.gradients) spare_bytes_ -= bytes;
}

DataPtr GradientMemory::lend(size_t bytes) {
  Blocks& blocks = blocks_.at(bytes);
  {
    const Lock lock(lending_mutex());
    if (!may_lend(blocks, bytes)) return {};
    ++blocks.lent;
    if (!blocks.kept.empty()) {
      DataPtr block = std::move(blocks.kept.back());
      blocks.kept.pop_back();
      return block;
    }
    if (++blocks.all > blocks.gradients) spare_bytes_ += bytes;
  }
  // Without the lock, because the source may have to warn, and a warning needs the GIL.
  try {
    return source_->allocate(bytes);
  } catch (...) {
    const Lock lock(lending_mutex());
    --blocks.lent;
    forget(blocks, bytes);
    throw;
  }
}

void GradientMemory::take_back(DataPtr block, size_t bytes) {
  Blocks& blocks = blocks_.at(bytes);
  const Lock lock(lending_mutex());
  --blocks.lent;
  blocks.lent_before = std::min(blocks.lent_before, blocks.lent);
  const bool spare = blocks.all > blocks.gradients && spare_bytes_ > most_spare_bytes_;
  if (spare || released_) {
    forget(blocks, bytes);
  } else {
    blocks.kept.push_back(std::move(block));
  }
}

void GradientMemory::open() {
  {
    const Lock lock(lending_mutex());
    open_ = true;
    for (auto& [bytes, blocks] : blocks_) blocks.lent_before = blocks.lent;
  }
  begin_lending(shared_from_this());
}

void GradientMemory::close() {
  const MemoryPtr self = shared_from_this();
  {
    const Lock lock(lending_mutex());
    open_ = false;
  }
  end_lending(*this);
}

void GradientMemory::release() {
  close();
  std::vector<DataPtr> dropped;  // to be freed without the lock
  const Lock lock(lending_mutex());
  released_ = true;
  for (auto& [bytes, blocks] : blocks_) {
    for (DataPtr& block : blocks.kept) {
      dropped.push_back(std::move(block));
      forget(blocks, bytes);
    }
    blocks.kept.clear();
  }
}

}  // namespace ours
