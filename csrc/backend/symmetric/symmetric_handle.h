#pragma once

#include <torch/version.h>

#if TORCH_VERSION_MINOR >= 15

#include <memory>
#include <torch/csrc/distributed/c10d/symm_mem/SymmetricMemory.hpp>
#include <vector>

#include "backend/symmetric/symmetric_group.h"
#include "transport/node/signal_pads.h"

namespace ours {

/// What rendezvous() gives: the memory of all ranks of a node, as far as this process is concerned, and signals between
/// them. It keeps all of that memory mapped.
class SymmetricHandle final : public c10d::symmetric_memory::SymmetricMemory {
 public:
  /// `buffers`: of each rank, its memory and its global rank. `pads`: its signal pad.
  SymmetricHandle(std::shared_ptr<SymmetricGroup> group, std::vector<SharedBlock> buffers,
                  std::vector<SharedBlock> pads);

  std::vector<void*> get_buffer_ptrs() override { return buffer_ptrs_; }
  std::vector<void*> get_signal_pad_ptrs() override { return pad_ptrs_; }
  /// The CPU is the device.
  void** get_buffer_ptrs_dev() override { return buffer_ptrs_.data(); }
  void** get_signal_pad_ptrs_dev() override { return pad_ptrs_.data(); }
  size_t get_buffer_size() override { return buffers_.front().block->bytes(); }
  size_t get_offset() override { return 0; }

  bool has_multicast_support() override { return false; }
  void* get_multicast_ptr() override { return nullptr; }

  // A timeout of 0 is that of the group's store.
  void barrier(int channel, size_t timeout_ms) override;
  void put_signal(int dst_rank, int channel, size_t timeout_ms) override;
  void wait_signal(int src_rank, int channel, size_t timeout_ms) override;

  int get_rank() override { return group_->rank(); }
  int get_world_size() override { return group_->size(); }
  c10::Device get_device() override { return c10::kCPU; }
  const std::vector<int>& get_rank_to_global_rank() override { return global_ranks_; }
  int* get_rank_to_global_rank_dev() override { return global_ranks_.data(); }
  bool world_within_direct_access() override { return true; }

 private:
  std::chrono::milliseconds timeout_of(size_t timeout_ms) const;

  const std::shared_ptr<SymmetricGroup> group_;
  const std::vector<SharedBlock> buffers_;
  const std::vector<SharedBlock> pads_;
  std::vector<void*> buffer_ptrs_;
  std::vector<void*> pad_ptrs_;
  std::vector<int> global_ranks_;
  SignalPads signals_;
};

}  // namespace ours

#endif  // TORCH_VERSION_MINOR >= 15
