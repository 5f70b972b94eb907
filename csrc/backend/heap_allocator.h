#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>

#include <memory>

#include "collectives/group.h"

namespace ours {

/// Gives tensors memory of a group's heap, in which all_reduce works without copies. Where the group has no heap, or is
/// gone, it is ordinary memory, and where the heap is exhausted, with a warning. Tensors may outlive the group.
class HeapAllocator final : public c10::Allocator {
 public:
  /// Never freed: a storage asks the allocator that it came from whenever it is resized, and keeps only its address.
  static std::shared_ptr<HeapAllocator> make(const std::shared_ptr<Group>& group);

  c10::DataPtr allocate(size_t bytes) override;
  void copy_data(void* to, const void* from, size_t bytes) const override;

  /// A tensor of `size` elements, one dimension, whose contents are undefined.
  at::Tensor tensor(int64_t size, const at::TensorOptions& options);

 private:
  explicit HeapAllocator(const std::shared_ptr<Group>& group) : group_(group) {}

  const std::weak_ptr<Group> group_;
};

}  // namespace ours
