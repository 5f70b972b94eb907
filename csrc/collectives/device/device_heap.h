#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "collectives/device/let_go_board.h"
#include "device/device.h"

namespace ours {

/// A place in memory that a rank shares: `offset` bytes into its segment of that number.
struct DevicePlace {
  uint64_t segment = 0;
  uint64_t offset = 0;
};

/// All the device memory that one rank of a group shares with its peers. It consists of segments, whose number only
/// grows while the group lives. Each serves one tensor at a time, since tensors of a group's memory are few and large,
/// or is used by the group itself. Safe to use from any thread.
class DeviceHeap : public std::enable_shared_from_this<DeviceHeap> {
 public:
  /// The memory is released when all tensors are freed, the group is gone, and `board` says that all peers have let go
  /// of it.
  DeviceHeap(std::shared_ptr<Device> device, std::shared_ptr<LetGoBoard> board, int rank);
  DeviceHeap(const DeviceHeap&) = delete;
  DeviceHeap& operator=(const DeviceHeap&) = delete;
  ~DeviceHeap();

  /// Returns cleared memory, aligned to a page, which keeps the heap alive. All use of it on any stream must have
  /// ended before it is dropped.
  std::shared_ptr<void> allocate(size_t bytes);

  /// The stream in which memory is cleared.
  StreamHandle stream() const { return stream_->handle(); }

  /// Adds a segment that is in use for good, and returns its number.
  uint64_t add_segment(size_t bytes);

  /// The place of [data, data + bytes) if it lies within what one allocate() returned.
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
    bool in_use;

    std::byte* begin() const { return static_cast<std::byte*>(memory.get()); }
  };

  /// The number of a free segment of at least that size, which is in use now.
  std::optional<uint64_t> take(size_t bytes);

  const std::shared_ptr<Device> device_;
  const std::shared_ptr<LetGoBoard> board_;
  const int rank_;
  mutable std::mutex mutex_;  // guards the segments
  std::vector<Segment> segments_;
  const std::unique_ptr<DeviceStream> stream_;
};

}  // namespace ours
