#pragma once

#include "cuda/driver.h"
#include "device/device.h"

namespace ours::cuda {

// All to be made with the device's context. CUDA keeps what is still needed when a stream or an event is destroyed, and
// does not wait for it.

class CudaStream : public DeviceStream {
 public:
  CudaStream(CUcontext context, int priority);
  ~CudaStream() override;
  StreamHandle handle() const override { return stream_; }

 private:
  CUcontext context_;
  cudaStream_t stream_ = nullptr;
};

class CudaEvent : public DeviceEvent {
 public:
  explicit CudaEvent(CUcontext context);
  ~CudaEvent() override;
  void record(StreamHandle stream) override;
  bool reached() override;
  void block(StreamHandle stream) override;

 private:
  CUcontext context_;
  cudaEvent_t event_ = nullptr;
};

}  // namespace ours::cuda
