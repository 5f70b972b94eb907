#pragma once

#include <chrono>
#include <cstring>
#include <memory>
#include <vector>

#include "device/device.h"

namespace ours::testing {

/// The device for the tests of the contract; each test program defines one.
std::shared_ptr<Device> contract_device();

/// Gives a stream of that device work which ends when the returned pointer is dropped.
std::shared_ptr<void> put_obstacle(StreamHandle stream);

/// A device with a stream and the usual helpers. Only the constructor allocates memory, before there are obstacles.
class OnDevice {
 public:
  explicit OnDevice(size_t bytes, size_t buffers = 1)
      : device(contract_device()), made_(device->make_stream()), event_(device->make_event()) {
    pinned_ = device->pinned_memory(bytes);
    for (size_t i = 0; i < buffers; ++i) memory_.push_back(device->memory(bytes));
  }

  StreamHandle stream() const { return made_->handle(); }
  char* at(size_t buffer) const { return static_cast<char*>(memory_[buffer].get()); }
  char* pinned() const { return static_cast<char*>(pinned_.get()); }

  void finish() { finish(stream()); }
  void finish(StreamHandle other) {
    event_->record(other);
    wait_reached(*event_, Deadline::after(std::chrono::seconds(30)), nullptr, "a test");
  }
  void put(void* to, const void* from, size_t bytes) {
    if (bytes == 0) return;
    std::memcpy(pinned(), from, bytes);
    device->copy(to, pinned(), bytes, stream());
    finish();
  }
  std::vector<char> get(const void* from, size_t bytes) {
    device->copy(pinned(), from, bytes, stream());
    finish();
    return {pinned(), pinned() + bytes};
  }

  const std::shared_ptr<Device> device;

 private:
  std::unique_ptr<DeviceStream> made_;
  std::unique_ptr<DeviceEvent> event_;
  std::shared_ptr<void> pinned_;
  std::vector<std::shared_ptr<void>> memory_;
};

}  // namespace ours::testing
