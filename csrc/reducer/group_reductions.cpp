#include "reducer/group_reductions.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/csrc/distributed/c10d/debug.h>

#include <exception>
#include <string>

namespace ours {

ReductionAbilities abilities_of(c10d::ProcessGroup& group, at::Device device) {
  std::string name;
  bool allocates = false;
  try {
    const auto backend = group.getBackend(device.type());
    name = backend->getBackendName();
    allocates = backend->supportsTensorAlloc(device.has_index() ? device.index() : c10::DeviceIndex{0});
  } catch (const std::exception&) {
    // A process group written in Python has no c10d backend to ask.
    return {};
  }
  const bool ours = name == "ours";
  // With TORCH_DISTRIBUTED_DEBUG=DETAIL, c10d compares the tensors of all ranks before each collective, and ranks may
  // divide a bucket into different pieces.
  const bool compared = c10d::debug_level() == c10d::DebugLevel::Detail;
  // Peers cannot reach gradients in the memory of an accelerator.
  const bool shares = ours && device.is_cpu();
  return {ours || name == "nccl", shares && !compared, shares && allocates};
}

std::shared_ptr<c10::Allocator> heap_of(c10d::ProcessGroup& group, at::Device device) {
  return group.getBackend(device.type())->getMemAllocator();
}

at::Tensor allocate_buffer(c10d::ProcessGroup& group, int64_t size, const at::TensorOptions& options) {
  const at::Device device = options.device();
  if (abilities_of(group, device).heap) {
    return group.getBackend(device.type())->allocateTensor(static_cast<long>(size), options);
  }
  return at::empty({size}, options);
}

c10::intrusive_ptr<c10d::Work> start_all_reduce(c10d::ProcessGroup& group, std::vector<at::Tensor> tensors,
                                                c10d::ReduceOp::RedOpType op) {
  c10d::AllreduceCoalescedOptions options;
  options.reduceOp = op;
  // For `ours` the two calls are the same, so a bucket may be one piece on this rank and several on another.
  if (tensors.size() > 1) return group.allreduce_coalesced(tensors, options);
  return group.allreduce(tensors, options);
}

std::vector<at::Tensor> gather(c10d::ProcessGroup& group, const at::Tensor& own) {
  std::vector<std::vector<at::Tensor>> all(1);
  for (int rank = 0; rank < group.getSize(); ++rank) all[0].push_back(at::empty_like(own));
  std::vector<at::Tensor> mine{own};
  group.allgather(all, mine)->wait();
  return all[0];
}

}  // namespace ours
