#pragma once

#include <memory>
#include <vector>

#include "collectives/device/device_heap.h"
#include "collectives/group.h"

namespace ours {

/// One rank's view of the memory that all ranks of a group share: its own memory where it lies, and that of its
/// peers, which is mapped on first use. Used by one thread at a time.
class MappedMemory {
 public:
  MappedMemory(std::shared_ptr<Device> device, std::shared_ptr<DeviceHeap> own, int rank, int ranks);

  /// Given how many segments each rank has by now, gathers the handles that are not known yet. Called with the same
  /// numbers on all ranks.
  void learn(Group& host, const Call& call, const std::vector<size_t>& segments);

  /// The address of that place in the rank's memory. Throws DeviceError if it cannot be mapped.
  std::byte* at(int rank, DevicePlace place);
  size_t segment_bytes(int rank, uint64_t segment) const;

 private:
  struct Segment {
    DeviceHeap::Shared shared;
    std::shared_ptr<void> mapped;  ///< null until it is first used
  };

  const std::shared_ptr<Device> device_;
  const std::shared_ptr<DeviceHeap> own_;
  const int rank_;
  std::vector<std::vector<Segment>> segments_;  ///< by rank
};

}  // namespace ours
