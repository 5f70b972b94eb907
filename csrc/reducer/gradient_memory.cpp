#include "reducer/gradient_memory.h"

#include <c10/core/CPUAllocator.h>

#include <algorithm>
#include <mutex>
#include <unordered_map>
#include <utility>

#include "common/process_wide.h"

namespace ours {

using c10::DataPtr;
using MemoryPtr = std::shared_ptr<GradientMemory>;

namespace {

/// The number of blocks of each size beyond the gradients, for tensors that live for a moment before a gradient of
/// their size comes.
constexpr size_t kSpareBlocks = 1;

/// The number of memories that are open in this thread. If it is 0, as for most allocations, nothing else is checked.
thread_local size_t open_count = 0;

/// The memories that are open in this thread.
struct OpenMemories {
  std::vector<MemoryPtr> list;
  ~OpenMemories() { open_count = 0; }
};
thread_local OpenMemories open_here;

/// A block that was lent to a tensor.
struct Loan {
  std::weak_ptr<GradientMemory> memory;
  DataPtr block;
  size_t bytes = 0;
};

struct Loans {
  std::unordered_map<void*, Loan> of;  ///< by what was lent

  void in_child() {}
};

/// The loans, and the lock for them and for all memories.
ProcessWide<Loans>& books() { return ProcessWide<Loans>::get(); }

using Lock = std::unique_lock<std::mutex>;

/// Replaces the process's CPU allocator, and asks the open memories first.
class GradientAllocator final : public c10::Allocator {
 public:
  /// Installs it, once.
  static void install() {
    static const bool kInstalled = [] {
      books();
      next_ = c10::GetCPUAllocator();
      c10::SetCPUAllocator(new GradientAllocator);
      return true;
    }();
    (void)kInstalled;
  }

  DataPtr allocate(size_t bytes) override {
    if (open_count > 0) {
      for (const MemoryPtr& memory : open_here.list) {
        if (!memory->serves(bytes)) continue;
        // A copy, because code that runs while memory is taken, such as a warning, may change the list.
        const MemoryPtr lender = memory;  // NOLINT(performance-unnecessary-copy-initialization)
        if (DataPtr block = lender->lend(bytes)) return booked({lender, std::move(block), bytes});
      }
    }
    return next_->allocate(bytes);
  }

  c10::DeleterFnPtr raw_deleter() const override { return next_->raw_deleter() == nullptr ? nullptr : &free_any; }

  void copy_data(void* to, const void* from, size_t bytes) const override { next_->copy_data(to, from, bytes); }

 private:
  static DataPtr booked(Loan loan) {
    void* const data = loan.block.get();
    const size_t bytes = loan.bytes;
    {
      const Lock lock(books().mutex);
      books().value.of[data] = std::move(loan);
    }
    report(data, static_cast<int64_t>(bytes));
    // Data and context are the same, as the raw interface of allocators demands.
    return {data, data, &free_any, c10::Device(c10::kCPU)};
  }

  /// Frees what came from here, or through the raw interface, from the next allocator.
  static void free_any(void* data) {
    Loan loan;
    {
      const Lock lock(books().mutex);
      const auto found = books().value.of.find(data);
      if (found != books().value.of.end()) {
        loan = std::move(found->second);
        books().value.of.erase(found);
      }
    }
    if (loan.bytes > 0) {
      if (const MemoryPtr memory = loan.memory.lock()) memory->take_back(std::move(loan.block), loan.bytes);
      report(data, -static_cast<int64_t>(loan.bytes));
    } else if (data != nullptr) {
      next_->raw_deleter()(data);
    }
  }

  static void report(void* data, int64_t bytes) {
    if (!c10::memoryProfilingEnabled()) return;
    c10::reportMemoryUsageToProfiler(data, bytes, 0, 0, c10::Device(c10::kCPU));
  }

  static inline c10::Allocator* next_ = nullptr;
};

}  // namespace

MemoryPtr GradientMemory::create(std::shared_ptr<c10::Allocator> source, const std::vector<size_t>& sizes,
                                 size_t most_spare_bytes) {
  GradientAllocator::install();
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
    const Lock lock(books().mutex);
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
    const Lock lock(books().mutex);
    --blocks.lent;
    forget(blocks, bytes);
    throw;
  }
}

void GradientMemory::take_back(DataPtr block, size_t bytes) {
  Blocks& blocks = blocks_.at(bytes);
  const Lock lock(books().mutex);
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
  const MemoryPtr self = shared_from_this();
  std::vector<MemoryPtr> dropped;  // to be destroyed without the lock
  const Lock lock(books().mutex);
  open_ = true;
  for (auto& [bytes, blocks] : blocks_) blocks.lent_before = blocks.lent;
  std::vector<MemoryPtr> still_open{self};
  for (const MemoryPtr& memory : open_here.list) {
    if (memory->open_ && memory != self) still_open.push_back(memory);
  }
  dropped = std::exchange(open_here.list, std::move(still_open));
  open_count = open_here.list.size();
}

void GradientMemory::close() {
  const MemoryPtr self = shared_from_this();
  const Lock lock(books().mutex);
  open_ = false;
  if (open_count == 0) return;  // at the thread's end the list may be gone already
  auto& list = open_here.list;
  list.erase(std::remove(list.begin(), list.end(), self), list.end());
  open_count = list.size();
}

void GradientMemory::release() {
  close();
  std::vector<DataPtr> dropped;  // to be freed without the lock
  const Lock lock(books().mutex);
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
