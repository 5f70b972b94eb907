#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <functional>
#include <memory>
#include <vector>

#include "device/device.h"

namespace ours {

/// Takes data of a device through pinned memory in steps, of which three are under way at a time: while the host works
/// on one, the device brings the next one down and the one before up, in a stream for each direction.
class StagingPipeline {
 public:
  /// With slots of so many bytes. All is allocated here: later, what waits for this pipeline may keep the device from
  /// having done all it was given, for which an allocation may wait.
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

  /// Returns when all steps are done, and with them the copies.
  void run(const Job& job);

  /// Waits for at most that long until all copies are done; whether they are.
  bool settle(std::chrono::milliseconds patience) noexcept;

  /// Keeps the memory although nobody will use it: the device may.
  void abandon() noexcept;

 private:
  static constexpr size_t kSlots = 3;

  const std::unique_ptr<DeviceStream> up_, down_;
  std::array<std::unique_ptr<DeviceEvent>, kSlots> fetched_, delivered_;
  std::array<std::shared_ptr<void>, kSlots> slots_;
};

}  // namespace ours
