#pragma once

#include "cuda/driver.h"
#include "device/device.h"

namespace ours::cuda {

// All of this must be made with the device's context. When a stream or an event is destroyed, CUDA keeps what is
// still needed and does not wait for it.

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
