#include "transport/node/channel.h"

#include <algorithm>
#include <cstring>

#include "kernels/reduce.h"

namespace ours {

// Positions only grow. Only the writer stores `written` and only the reader stores `read`, each with release after it
// has copied; each side loads the other's with acquire before it copies. So bytes are read after they were written,
// and overwritten after they were read. A release does not order non-temporal stores, so copy_bytes() does.

Channel::Channel(NodeSession& session, int from, int to) : capacity_(session.layout().ring_bytes) {
  const size_t offset = session.layout().channel(static_cast<size_t>(from), static_cast<size_t>(to));
  head_ = session.at<ChannelHead>(offset);
  ring_ = session.at<std::byte>(offset + sizeof(ChannelHead));
}

size_t Channel::readable() const {
  return static_cast<size_t>(head_->written.load(std::memory_order_acquire) -
                             head_->read.load(std::memory_order_relaxed));
}

size_t Channel::writable() const {
  const uint64_t used = head_->written.load(std::memory_order_relaxed) - head_->read.load(std::memory_order_acquire);
  return capacity_ - static_cast<size_t>(used);
}

size_t Channel::write(const void* data, size_t bytes, bool around) {
  bytes = std::min(bytes, writable());
  if (bytes == 0) return 0;
  const uint64_t position = head_->written.load(std::memory_order_relaxed);
  const size_t at = static_cast<size_t>(position % capacity_);
  const size_t first = std::min(bytes, capacity_ - at);
  const auto* from = static_cast<const std::byte*>(data);
  copy_bytes(ring_ + at, from, first, around);
  copy_bytes(ring_, from + first, bytes - first, around);
  head_->written.store(position + bytes, std::memory_order_release);
  return bytes;
}

size_t Channel::read(void* data, size_t bytes) {
  bytes = std::min(bytes, readable());
  if (bytes == 0) return 0;
  const uint64_t position = head_->read.load(std::memory_order_relaxed);
  copy_out(position, data, bytes);
  head_->read.store(position + bytes, std::memory_order_release);
  return bytes;
}

void Channel::skip(size_t bytes) {
  head_->read.store(head_->read.load(std::memory_order_relaxed) + bytes, std::memory_order_release);
}

void Channel::peek(void* data, size_t bytes) const {
  copy_out(head_->read.load(std::memory_order_relaxed), data, bytes);
}

bool Channel::take() {
  // What was read had been read when this was still false.
  if (head_->withdrawn.load(std::memory_order_seq_cst)) return false;
  head_->taken.fetch_add(1, std::memory_order_release);
  return true;
}

uint64_t Channel::taken() const { return head_->taken.load(std::memory_order_acquire); }

void Channel::withdraw() { head_->withdrawn.store(true, std::memory_order_seq_cst); }

void Channel::copy_out(uint64_t position, void* data, size_t bytes) const {
  const size_t at = static_cast<size_t>(position % capacity_);
  const size_t first = std::min(bytes, capacity_ - at);
  std::memcpy(data, ring_ + at, first);
  std::memcpy(static_cast<std::byte*>(data) + first, ring_, bytes - first);
}

}  // namespace ours
