#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "collectives/device/free_ranges.h"
#include "collectives/device/let_go_board.h"
#include "device/device.h"

namespace ours {

/// A place in memory that a rank shares: `offset` bytes into its segment of that number.
struct DevicePlace {
  uint64_t segment = 0;
  uint64_t offset = 0;
};

/// All the device memory that one rank of a group shares with its peers. It consists of segments, whose number only
/// grows while the group lives: some are given out in pieces for tensors, others are used as a whole. Safe to use
/// from any thread.
class DeviceHeap : public std::enable_shared_from_this<DeviceHeap> {
 public:
  /// The memory is released when all pieces are freed, the group is gone, and `board` says that all peers have let go
  /// of it. `board` may be null, which means that nobody knows.
  DeviceHeap(std::shared_ptr<Device> device, std::shared_ptr<LetGoBoard> board, int rank);
  DeviceHeap(const DeviceHeap&) = delete;
  DeviceHeap& operator=(const DeviceHeap&) = delete;
  ~DeviceHeap();

  /// Returns zeroed memory, aligned to a page, which keeps the heap alive. All use of it on any stream must have
  /// ended before it is dropped.
  std::shared_ptr<void> allocate(size_t bytes);

  /// The stream in which memory is zeroed.
  StreamHandle stream() const { return stream_->handle(); }

  /// Adds a segment that is used as a whole, and returns its number.
  uint64_t add_segment(size_t bytes);

  /// The place of [data, data + bytes) if it lies within one piece from allocate().
  std::optional<DevicePlace> place_of(const void* data, size_t bytes) const;

  struct Shared {
    size_t bytes;
    MemoryHandle handle;
  };
  size_t segments() const;
  Shared shared(uint64_t segment) const;
  std::byte* at(DevicePlace place) const;

 private:
  struct Segment {
    std::shared_ptr<void> memory;
    size_t bytes;
    MemoryHandle handle;
    FreeRanges ranges;

    std::byte* begin() const { return static_cast<std::byte*>(memory.get()); }
  };

  Segment make_segment(size_t bytes, bool for_pieces);
  DevicePlace take(size_t bytes);
  void free(DevicePlace place) noexcept;
  void zero(std::byte* data, size_t bytes);

  const std::shared_ptr<Device> device_;
  const std::shared_ptr<LetGoBoard> board_;
  const int rank_;
  mutable std::mutex mutex_;  // guards the segments
  std::vector<Segment> segments_;
  std::mutex zero_mutex_;  // guards the making of zeros
  const std::unique_ptr<DeviceStream> stream_;
  const std::unique_ptr<DeviceEvent> zeroed_;
  const std::shared_ptr<void> zeros_;
};

}  // namespace ours
