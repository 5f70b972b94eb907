#include "reducer/lending_allocator.h"

#include <c10/core/CPUAllocator.h>

#include <algorithm>
#include <unordered_map>
#include <utility>
#include <vector>

#include "common/error.h"
#include "common/process_wide.h"

namespace ours {

using c10::DataPtr;
using LenderPtr = std::shared_ptr<Lender>;

namespace {

struct Sharing {
  std::shared_ptr<c10::Allocator> heap;
  size_t least;
};

/// The numbers of lenders and heaps of this thread. If both are 0, as for most allocations, nothing else is checked.
struct Counts {
  size_t lenders;
  size_t heaps;
};
thread_local Counts counts{};

struct OfThisThread {
  std::vector<LenderPtr> lenders;
  std::vector<Sharing> heaps;
  // Other objects of the thread may be destroyed later, and make tensors then.
  ~OfThisThread() { counts = {}; }
};
thread_local OfThisThread here;

/// A block that was lent to a tensor.
struct Loan {
  std::weak_ptr<Lender> lender;  ///< null for one from a heap
  DataPtr block;
  size_t bytes = 0;
};

struct Loans {
  std::unordered_map<void*, Loan> of;  ///< by what was lent

  void in_child() {}
};

ProcessWide<Loans>& books() { return ProcessWide<Loans>::get(); }

using Lock = std::unique_lock<std::mutex>;

class LendingAllocator final : public c10::Allocator {
 public:
  /// Installs it, once.
  static void install() {
    static const bool kInstalled = [] {
      next_ = c10::GetCPUAllocator();
      c10::SetCPUAllocator(new LendingAllocator);
      return true;
    }();
    (void)kInstalled;
  }

  DataPtr allocate(size_t bytes) override {
    if (counts.lenders > 0) {
      for (const LenderPtr& one : here.lenders) {
        if (!one->serves(bytes)) continue;
        // A copy, because code that runs while memory is taken, such as a warning, may change the list.
        const LenderPtr lender = one;  // NOLINT(performance-unnecessary-copy-initialization)
        if (DataPtr block = lender->lend(bytes)) return booked({lender, std::move(block), bytes});
      }
    }
    if (counts.heaps > 0 && bytes > 0 && bytes >= here.heaps.back().least) {
      const auto heap = here.heaps.back().heap;  // NOLINT(performance-unnecessary-copy-initialization): as above
      return booked({{}, heap->allocate(bytes), bytes});
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
      if (const LenderPtr lender = loan.lender.lock()) lender->take_back(std::move(loan.block), loan.bytes);
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

std::mutex& lending_mutex() { return books().mutex; }

void install_lending_allocator() { LendingAllocator::install(); }

void begin_lending(const LenderPtr& lender) {
  install_lending_allocator();
  std::vector<LenderPtr> dropped;  // to be destroyed without the lock
  const Lock lock(lending_mutex());
  std::vector<LenderPtr> all{lender};
  for (const LenderPtr& one : here.lenders) {
    if (one != lender && !one->has_ended()) all.push_back(one);
  }
  dropped = std::exchange(here.lenders, std::move(all));
  counts.lenders = here.lenders.size();
}

void end_lending(const Lender& lender) {
  if (counts.lenders == 0) return;  // at the thread's end the list may be gone already
  auto& all = here.lenders;
  all.erase(std::remove_if(all.begin(), all.end(), [&](const LenderPtr& one) { return one.get() == &lender; }),
            all.end());
  counts.lenders = all.size();
}

void begin_sharing_tensors(std::shared_ptr<c10::Allocator> heap, size_t least) {
  install_lending_allocator();
  here.heaps.push_back({std::move(heap), least});
  counts.heaps = here.heaps.size();
}

void end_sharing_tensors() {
  if (counts.heaps == 0) throw Error("this thread shares no tensors; leave the context where it was entered");
  here.heaps.pop_back();
  counts.heaps = here.heaps.size();
}

}  // namespace ours
