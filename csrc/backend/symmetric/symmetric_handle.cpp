#include "backend/symmetric/symmetric_handle.h"

#if TORCH_VERSION_MINOR >= 15

#include <algorithm>

namespace ours {

SymmetricHandle::SymmetricHandle(std::shared_ptr<SymmetricGroup> group, std::vector<SharedBlock> buffers,
                                 std::vector<SharedBlock> pads)
    : group_(std::move(group)),
      buffers_(std::move(buffers)),
      pads_(std::move(pads)),
      signals_(group_->session(), data_of(pads_), pads_.front().block->bytes()) {
  for (std::byte* data : data_of(buffers_)) buffer_ptrs_.push_back(data);
  for (std::byte* data : data_of(pads_)) pad_ptrs_.push_back(data);
  for (const SharedBlock& one : buffers_) global_ranks_.push_back(static_cast<int>(one.facts[0]));
}

std::chrono::milliseconds SymmetricHandle::timeout_of(size_t timeout_ms) const {
  using std::chrono::milliseconds;
  const auto most = static_cast<size_t>(milliseconds::max().count());
  return timeout_ms == 0 ? group_->timeout() : milliseconds(std::min(timeout_ms, most));
}

void SymmetricHandle::barrier(int channel, size_t timeout_ms) {
  group_->run([&] { signals_.barrier(channel, timeout_of(timeout_ms)); });
}

void SymmetricHandle::put_signal(int dst_rank, int channel, size_t timeout_ms) {
  group_->run([&] { signals_.put(dst_rank, channel, timeout_of(timeout_ms)); });
}

void SymmetricHandle::wait_signal(int src_rank, int channel, size_t timeout_ms) {
  group_->run([&] { signals_.wait(src_rank, channel, timeout_of(timeout_ms)); });
}

}  // namespace ours

#endif  // TORCH_VERSION_MINOR >= 15
