#include "reducer/used_map.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <utility>

namespace ours {
namespace {

at::TensorOptions map_options(at::Device device) { return at::dtype(at::kInt).device(device); }

}  // namespace

UsedMap::UsedMap(size_t parameter_count, at::Device device, bool tracked)
    : device_(device), tracked_(tracked), used_(parameter_count, 0) {}

at::Tensor UsedMap::unused_map() const { return at::zeros({static_cast<int64_t>(used_.size())}, map_options(device_)); }

void UsedMap::start_reduction(c10d::ProcessGroup& group) {
  const auto count = static_cast<int64_t>(used_.size());
  // The tensors are new each time: the reduction reads them while the next step may already mark parameters.
  reduced_ = at::empty({count}, map_options(device_));
  const at::Tensor here = at::from_blob(used_.data(), {count}, map_options(at::kCPU));
  if (device_.is_cpu()) {
    reduced_.copy_(here);
  } else {
    // The allocator of pinned memory keeps it until it has been read, so the copy need not be waited for.
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

bool UsedMap::unused_everywhere(size_t index) {
  if (!may_be_unused(index)) return false;
  read_reduced();
  return used_[index] == 0;
}

void UsedMap::finish(bool keep) {
  if (keep) return read_reduced();
  // The next reduction must not start beside this one, even if its result was not needed. On an accelerator that only
  // orders streams, whereas reading the map would make the host wait for the device.
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
