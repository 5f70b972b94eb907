#pragma once

#include <memory>
#include <set>
#include <string>
#include <vector>

#include "cuda/driver.h"
#include "device/device.h"

namespace ours::cuda {

/// A CUDA device, with the primary context that the program uses too.
class CudaDevice : public Device {
 public:
  /// Opens the device: makes its context, and loads all kernels.
  explicit CudaDevice(int index);

  std::string identity() const override { return identity_; }
  std::string hardware() const override { return hardware_; }
  bool reaches(const std::string& identity) const override { return reached_.count(identity) != 0; }
  size_t memory_bytes() const override { return memory_bytes_; }

  std::unique_ptr<DeviceStream> make_stream() override;
  std::unique_ptr<DeviceEvent> make_event() override;
  bool is_capturing(StreamHandle stream) const override;
  void apart_from_captures(const std::function<void()>& body) const override;

  MemoryHandle share(const void* memory) override;
  std::shared_ptr<void> map(const MemoryHandle& handle) override;

  void copy(void* to, const void* from, size_t bytes, StreamHandle stream) override;
  void reduce(const std::vector<void*>& results, const std::vector<const void*>& sources, size_t count, DType dtype,
              const Reduction& reduction, StreamHandle stream) override;

  CUcontext context() const { return context_; }

 private:
  std::shared_ptr<void> make_pinned(size_t bytes) override;
  std::shared_ptr<void> make_memory(size_t bytes) override;

  CUcontext context_ = nullptr;  ///< never released
  int priority_ = 0;             ///< the priority of our streams
  std::string identity_, hardware_;
  size_t memory_bytes_ = 0;
  std::set<std::string> reached_;  ///< the identities of the devices that this process sees and this one reaches
};

}  // namespace ours::cuda
