#pragma once

#include <array>
#include <cstddef>
#include <functional>
#include <memory>
#include <vector>

#include "device/device.h"

namespace ours {

/// Takes a device's data through pinned memory in steps, of which three are under way at a time: while the host works
/// on one, the device brings the next one down and the previous one up, in a stream for each direction.
class StagingPipeline {
 public:
  /// Allocates slots of that many bytes.
  StagingPipeline(Device& device, size_t slot_bytes);

  /// What happens in step k, in `slot`.
  struct Job {
    size_t steps;
    std::function<void(size_t k, std::byte* slot, StreamHandle down)> fetch;  ///< gives the stream copies
    std::function<void(size_t k, std::byte* slot)> exchange;                  ///< works on the host
    std::function<void(size_t k, std::byte* slot, StreamHandle up)> deliver;  ///< gives the stream copies
    std::function<void(DeviceEvent& event, const char* doing)> wait;
  };

  std::vector<StreamHandle> streams() const { return {up_->handle(), down_->handle()}; }

  /// Returns when all steps and their copies are done.
  void run(const Job& job);

  /// The memory of all slots.
  const std::shared_ptr<void>& memory() const { return memory_; }

 private:
  static constexpr size_t kSlots = 3;

  const size_t slot_bytes_;
  const std::unique_ptr<DeviceStream> up_, down_;
  const std::shared_ptr<void> memory_;
  std::array<std::unique_ptr<DeviceEvent>, kSlots> fetched_, delivered_;
};

}  // namespace ours
