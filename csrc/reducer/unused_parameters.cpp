#include "reducer/unused_parameters.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <unordered_map>
#include <unordered_set>
#include <utility>

namespace ours {
namespace {

at::TensorOptions map_options(at::Device device) { return at::dtype(at::kInt).device(device); }

}  // namespace

std::vector<size_t> find_unreached(const std::vector<NodePtr>& accumulators, const std::vector<at::Tensor>& outputs) {
  using torch::autograd::Node;
  std::unordered_set<const Node*> seen;
  std::vector<const Node*> to_visit;
  const auto visit = [&](const Node* node) {
    if (node != nullptr && seen.insert(node).second) to_visit.push_back(node);
  };
  for (const at::Tensor& output : outputs) {
    // The gradient edge of a leaf is its accumulator: an output may be a parameter itself.
    if (output.defined() && output.requires_grad()) visit(torch::autograd::impl::gradient_edge(output).function.get());
  }
  while (!to_visit.empty()) {
    const Node* node = to_visit.back();
    to_visit.pop_back();
    for (const auto& edge : node->next_edges()) visit(edge.function.get());
  }
  std::vector<size_t> unreached;
  for (size_t index = 0; index < accumulators.size(); ++index) {
    if (seen.find(accumulators[index].get()) == seen.end()) unreached.push_back(index);
  }
  return unreached;
}

UsedMap::UsedMap(size_t parameter_count, at::Device device) : device_(device), used_(parameter_count, 0) {}

at::Tensor UsedMap::unused_map() const { return at::zeros({static_cast<int64_t>(used_.size())}, map_options(device_)); }

void UsedMap::start_reduction(c10d::ProcessGroup& group) {
  const auto count = static_cast<int64_t>(used_.size());
  // Fresh tensors each time: the reduction reads them while the next step may already mark parameters.
  reduced_ = at::empty({count}, map_options(device_));
  const at::Tensor here = at::from_blob(used_.data(), {count}, map_options(at::kCPU));
  if (device_.is_cpu()) {
    reduced_.copy_(here);
  } else {
    // From pinned memory, which its allocator keeps until it has been read, the copy waits for nothing.
    const at::Tensor staged = at::empty({count}, map_options(at::kCPU).pinned_memory(true));
    staged.copy_(here);
    reduced_.copy_(staged, /*non_blocking=*/true);
  }
  std::vector<at::Tensor> tensors{reduced_};
  work_ = group.allreduce(tensors);
}

void UsedMap::await_reduction() {
  if (!work_) return;
  work_->wait();
  work_.reset();
  unread_ = true;
}

void UsedMap::read_reduced() {
  await_reduction();
  if (!std::exchange(unread_, false)) return;
  const at::Tensor on_cpu = reduced_.cpu();
  std::copy_n(on_cpu.const_data_ptr<int32_t>(), used_.size(), used_.begin());
}

bool UsedMap::used_anywhere(size_t index) {
  if (used_[index] == 0) read_reduced();
  return used_[index] != 0;
}

void UsedMap::finish(bool keep) {
  if (keep) return read_reduced();
  // Even if nobody asked: the next reduction must not start beside this one. On an accelerator that is a matter of
  // streams, while reading the map would have the host wait for the device.
  await_reduction();
  unread_ = false;
  std::fill(used_.begin(), used_.end(), 0);
}

void UsedMap::reset() {
  work_.reset();
  unread_ = false;
  std::fill(used_.begin(), used_.end(), 0);
}

}  // namespace ours
