#include "cuda/cuda_device.h"

#include <fstream>
#include <utility>

#include "cuda/streams.h"

namespace ours::cuda {
namespace {

CUdevice driver_device(int index) {
  CUdevice device = 0;
  check(driver().device_get(&device, index), "cuDeviceGet");
  return device;
}

/// The UUID of the device, or of the part of one that this process has (MIG).
std::string uuid_of(int index) {
  CUuuid uuid{};
  check(driver().device_uuid(&uuid, driver_device(index)), "cuDeviceGetUuid");
  static constexpr char kDigits[] = "0123456789abcdef";
  std::string text = "cuda-";
  for (const char byte : uuid.bytes) {
    text += kDigits[static_cast<unsigned char>(byte) >> 4];
    text += kDigits[static_cast<unsigned char>(byte) & 15];
  }
  return text;
}

/// The machine and the board's place in it. The parts of a board have UUIDs of their own, but the board's place on
/// the PCI bus.
std::string hardware_of(int index) {
  std::string boot;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
  if (boot.empty()) return uuid_of(index);
  char place[32] = {};
  check(cudaDeviceGetPCIBusId(place, sizeof(place), index), "cudaDeviceGetPCIBusId");
  return boot + "/" + place;
}

CUcontext retain_context(int index) {
  CUcontext context = nullptr;
  check(driver().retain(&context, driver_device(index)), "cuDevicePrimaryCtxRetain");
  return context;
}

}  // namespace

CudaDevice::CudaDevice(int index) : index_(index), context_(retain_context(index)), identity_(uuid_of(index)) {
  const ContextGuard guard(context_);
  hardware_ = hardware_of(index);
  int lowest = 0;
  check(cudaDeviceGetStreamPriorityRange(&lowest, &priority_), "cudaDeviceGetStreamPriorityRange");
  int count = 0;
  check(cudaGetDeviceCount(&count), "cudaGetDeviceCount");
  for (int other = 0; other < count; ++other) {
    int can = other == index ? 1 : 0;
    if (other != index) check(cudaDeviceCanAccessPeer(&can, index, other), "cudaDeviceCanAccessPeer");
    peers_[uuid_of(other)] = can != 0;
  }
  load_kernels();
}

bool CudaDevice::reaches(const std::string& identity) const {
  const auto found = peers_.find(identity);
  return found != peers_.end() && found->second;
}

std::unique_ptr<DeviceStream> CudaDevice::make_stream() {
  const ContextGuard guard(context_);
  return std::make_unique<CudaStream>(context_, priority_);
}

std::unique_ptr<DeviceEvent> CudaDevice::make_event() {
  const ContextGuard guard(context_);
  return std::make_unique<CudaEvent>(context_);
}

bool CudaDevice::is_capturing(StreamHandle stream) const {
  const ContextGuard guard(context_);
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  const cudaError_t error = cudaStreamIsCapturing(static_cast<cudaStream_t>(stream), &status);
  if (error == cudaErrorStreamCaptureImplicit) {
    // This is the default stream, and another stream that waits for it is being captured: work would end that
    // capture.
    static_cast<void>(cudaGetLastError());
    return true;
  }
  check(error, "cudaStreamIsCapturing");
  return status != cudaStreamCaptureStatusNone;
}

std::shared_ptr<void> CudaDevice::make_pinned(size_t bytes) {
  const ContextGuard guard(context_);
  return pinned_block(bytes, context_);
}

std::shared_ptr<void> CudaDevice::make_memory(size_t bytes) {
  const ContextGuard guard(context_);
  return device_block(bytes, context_);
}

MemoryHandle CudaDevice::share(const void* memory) {
  const ContextGuard guard(context_);
  return share_block(memory);
}

std::shared_ptr<void> CudaDevice::map(const MemoryHandle& handle) {
  const ContextGuard guard(context_);
  return map_block(handle, context_);
}

void CudaDevice::copy(void* to, const void* from, size_t bytes, StreamHandle stream) {
  if (bytes == 0) return;
  const ContextGuard guard(context_);
  check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, static_cast<cudaStream_t>(stream)), "cudaMemcpyAsync");
}

void CudaDevice::clear(void* memory, size_t bytes, StreamHandle stream) {
  const ContextGuard guard(context_);
  check(cudaMemsetAsync(memory, 0, bytes, static_cast<cudaStream_t>(stream)), "cudaMemsetAsync");
}

}  // namespace ours::cuda
