#include "backend/shared_tensors.h"

#include <c10/core/CPUAllocator.h>

#include <utility>
#include <vector>

#include "common/error.h"

namespace ours {

namespace {

struct Sharing {
  std::shared_ptr<c10::Allocator> heap;
  size_t least;
};

std::vector<Sharing>& of_this_thread() {
  thread_local std::vector<Sharing> all;
  return all;
}

/// What torch asks for the memory of CPU tensors, in place of the allocator before.
class ChosenByThread final : public c10::Allocator {
 public:
  explicit ChosenByThread(c10::Allocator* before) : before_(before) {}

  c10::DataPtr allocate(size_t bytes) override {
    const std::vector<Sharing>& sharing = of_this_thread();
    if (sharing.empty() || bytes < sharing.back().least) return before_->allocate(bytes);
    return sharing.back().heap->allocate(bytes);
  }
  c10::DeleterFnPtr raw_deleter() const override { return before_->raw_deleter(); }
  void copy_data(void* to, const void* from, size_t bytes) const override { before_->copy_data(to, from, bytes); }

 private:
  c10::Allocator* const before_;
};

void install() {
  // Never taken out again, nor freed: storages keep the address of their allocator.
  static c10::Allocator* const kOurs = new ChosenByThread(c10::GetCPUAllocator());
  if (c10::GetCPUAllocator() != kOurs) c10::SetCPUAllocator(kOurs);
  if (c10::GetCPUAllocator() != kOurs) {
    throw Error("an allocator of CPU tensors of a higher priority is in force; without it, tensors can be shared");
  }
}

}  // namespace

void begin_sharing_tensors(std::shared_ptr<c10::Allocator> heap, size_t least) {
  install();
  of_this_thread().push_back({std::move(heap), least});
}

void end_sharing_tensors() {
  if (of_this_thread().empty()) throw Error("this thread shares no tensors; leave the context where it was entered");
  of_this_thread().pop_back();
}

}  // namespace ours
