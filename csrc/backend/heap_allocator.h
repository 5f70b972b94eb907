#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>

#include <atomic>
#include <memory>
#include <mutex>

#include "collectives/group.h"

namespace ours {

/// Gives tensors memory from a group's heap, in which all_reduce works without copies. It gives ordinary memory if the
/// group has no heap or is gone, and, with a warning, if the heap is exhausted. Tensors may outlive the group.
class HeapAllocator final : public c10::Allocator {
 public:
  /// Once it has given memory, it is never freed: a storage keeps its allocator's address, and asks it for memory
  /// whenever it is resized.
  static std::shared_ptr<HeapAllocator> make(const std::shared_ptr<Group>& group);

  c10::DataPtr allocate(size_t bytes) override;
  void copy_data(void* to, const void* from, size_t bytes) const override;

  /// A tensor with one dimension of `size` elements, and undefined contents.
  at::Tensor tensor(int64_t size, const at::TensorOptions& options);

 private:
  explicit HeapAllocator(const std::shared_ptr<Group>& group) : group_(group) {}

  std::shared_ptr<Group> group();
  /// What the last owner does, which leaves nothing of the group behind.
  static void let_go(HeapAllocator* allocator);

  std::mutex mutex_;
  std::weak_ptr<Group> group_;  // guarded by mutex_; a weak pointer, too, keeps the memory in which the group was
  std::atomic<bool> used_{false};
};

}  // namespace ours
