#pragma once

#include <cstddef>
#include <cstdint>

#include "transport/node/node_session.h"

namespace ours {

/// One end of the byte stream from one rank to another: a ring in shared memory with one writing and one reading
/// thread at a time. Neither side ever waits.
class Channel {
 public:
  Channel(NodeSession& session, int from, int to);

  /// Bytes that can be read now.
  size_t readable() const;

  /// Bytes that can be written now.
  size_t writable() const;

  /// Copies up to `bytes` bytes in or out; returns how many. `around`: around the writer's cache, which is faster if
  /// the reader does not share it.
  size_t write(const void* data, size_t bytes, bool around = false);
  size_t read(void* data, size_t bytes);

  /// Drops the next `bytes` bytes; all of them must be readable.
  void skip(size_t bytes);

  /// Copies the next `bytes` bytes without taking them out; all of them must be readable.
  void peek(void* data, size_t bytes) const;

  size_t capacity() const { return capacity_; }
  /// For the writer: how many bytes it has ever written, and how many of them have been read.
  uint64_t written() const { return head_->written.load(std::memory_order_relaxed); }
  uint64_t read_so_far() const { return head_->read.load(std::memory_order_acquire); }

  /// The reader has read a message where it lies in the writer's memory. Returns false if that may have changed before.
  bool take();
  /// How many the reader has taken.
  uint64_t taken() const;
  /// The writer's memory is about to change although a message there has not been taken.
  void withdraw();

 private:
  void copy_out(uint64_t position, void* data, size_t bytes) const;

  ChannelHead* head_ = nullptr;
  std::byte* ring_ = nullptr;
  size_t capacity_ = 0;
};

}  // namespace ours
