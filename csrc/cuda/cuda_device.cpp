#include "cuda/cuda_device.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <fstream>
#include <random>

#include "common/partition.h"
#include "cuda/reduce_launch.h"

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

/// A stream or an event must be made with the device's context. When one is destroyed, CUDA keeps what is still needed
/// and does not wait for it.
class CudaStream : public DeviceStream {
 public:
  CudaStream(CUcontext context, int priority) : context_(context) {
    // The stream and the default stream do not wait for each other.
    check(cudaStreamCreateWithPriority(&stream_, cudaStreamNonBlocking, priority), "cudaStreamCreateWithPriority");
  }
  ~CudaStream() override {
    end_quietly(context_, [&] { return cudaStreamDestroy(stream_); });
  }
  StreamHandle handle() const override { return stream_; }

 private:
  CUcontext context_;
  cudaStream_t stream_ = nullptr;
};

class CudaEvent : public DeviceEvent {
 public:
  explicit CudaEvent(CUcontext context) : context_(context) {
    check(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming), "cudaEventCreateWithFlags");
  }
  ~CudaEvent() override {
    end_quietly(context_, [&] { return cudaEventDestroy(event_); });
  }
  void record(StreamHandle stream) override {
    const ContextGuard guard(context_);
    check(cudaEventRecord(event_, static_cast<cudaStream_t>(stream)), "cudaEventRecord");
  }
  bool reached() override {
    const ContextGuard guard(context_);
    const cudaError_t state = cudaEventQuery(event_);
    if (state == cudaErrorNotReady) {
      static_cast<void>(cudaGetLastError());  // it is no error, but would be taken for one
      return false;
    }
    check(state, "cudaEventQuery");
    return true;
  }
  void block(StreamHandle stream) override {
    const ContextGuard guard(context_);
    check(cudaStreamWaitEvent(static_cast<cudaStream_t>(stream), event_, 0), "cudaStreamWaitEvent");
  }

 private:
  CUcontext context_;
  cudaEvent_t event_ = nullptr;
};

/// Loads all kernels, since CUDA may wait for the device when it loads one.
void load_kernels() {
  for (int element = 0; element <= static_cast<int>(Element::C128); ++element) {
    for (int combine = 0; combine <= static_cast<int>(Combine::Xor); ++combine) {
      const ReduceKernel kernel = find_reduce_kernel(static_cast<Element>(element), static_cast<Combine>(combine));
      cudaFuncAttributes attributes{};
      if (kernel.function == nullptr) continue;
      check(cudaFuncGetAttributes(&attributes, kernel.function), "cudaFuncGetAttributes");
    }
  }
}

/// The unit of memory that CUDA does not share among allocations: other processes map whole units.
constexpr size_t kUnit = size_t{2} << 20;

/// Tells this process's memory from that of others.
using ProcessToken = std::array<unsigned char, 16>;

/// The content of a MemoryHandle.
struct SharedBlock {
  cudaIpcMemHandle_t ipc;
  ProcessToken process;
  const void* address;  ///< in the process that shared it
};
static_assert(sizeof(SharedBlock) <= sizeof(MemoryHandle), "it has to fit");

const ProcessToken& own_token() {
  static const ProcessToken kToken = [] {
    std::random_device random;
    ProcessToken token{};
    for (unsigned char& byte : token) byte = static_cast<unsigned char>(random());
    return token;
  }();
  return kToken;
}

}  // namespace

CudaDevice::CudaDevice(int index) : context_(retain_context(index)), identity_(uuid_of(index)) {
  const ContextGuard guard(context_);
  hardware_ = hardware_of(index);
  size_t free = 0;
  check(cudaMemGetInfo(&free, &memory_bytes_), "cudaMemGetInfo");
  int lowest = 0;
  check(cudaDeviceGetStreamPriorityRange(&lowest, &priority_), "cudaDeviceGetStreamPriorityRange");
  int count = 0;
  check(cudaGetDeviceCount(&count), "cudaGetDeviceCount");
  for (int other = 0; other < count; ++other) {
    int can = other == index ? 1 : 0;
    if (other != index) check(cudaDeviceCanAccessPeer(&can, index, other), "cudaDeviceCanAccessPeer");
    if (can != 0) reached_.insert(uuid_of(other));
  }
  load_kernels();
}

std::unique_ptr<DeviceStream> CudaDevice::make_stream() {
  const ContextGuard guard(context_);
  return std::make_unique<CudaStream>(context_, priority_);
}

std::unique_ptr<DeviceEvent> CudaDevice::make_event() {
  const ContextGuard guard(context_);
  return std::make_unique<CudaEvent>(context_);
}

void CudaDevice::apart_from_captures(const std::function<void()>& body) const {
  const ContextGuard guard(context_);
  body();
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
  void* memory = nullptr;
  const size_t some = std::max<size_t>(bytes, 1);
  check(cudaHostAlloc(&memory, some, cudaHostAllocMapped | cudaHostAllocPortable), "cudaHostAlloc");
  std::memset(memory, 0, some);
  return {memory, [context = context_](void* own) { end_quietly(context, [&] { return cudaFreeHost(own); }); }};
}

std::shared_ptr<void> CudaDevice::make_memory(size_t bytes) {
  const ContextGuard guard(context_);
  void* memory = nullptr;
  check(cudaMalloc(&memory, std::max<size_t>(1, piece_count(bytes, kUnit)) * kUnit), "cudaMalloc");
  return {memory, [context = context_](void* own) { end_quietly(context, [&] { return cudaFree(own); }); }};
}

MemoryHandle CudaDevice::share(const void* memory) {
  const ContextGuard guard(context_);
  SharedBlock block{};
  check(cudaIpcGetMemHandle(&block.ipc, const_cast<void*>(memory)), "cudaIpcGetMemHandle");
  block.process = own_token();
  block.address = memory;
  MemoryHandle handle{};
  std::memcpy(handle.data(), &block, sizeof(block));
  return handle;
}

std::shared_ptr<void> CudaDevice::map(const MemoryHandle& handle) {
  SharedBlock block{};
  std::memcpy(&block, handle.data(), sizeof(block));
  // CUDA refuses to map memory of the same process.
  if (block.process == own_token()) return {const_cast<void*>(block.address), [](void*) {}};
  const ContextGuard guard(context_);
  void* mapped = nullptr;
  check(cudaIpcOpenMemHandle(&mapped, block.ipc, cudaIpcMemLazyEnablePeerAccess), "cudaIpcOpenMemHandle");
  return {mapped, [context = context_](void* of) { end_quietly(context, [&] { return cudaIpcCloseMemHandle(of); }); }};
}

void CudaDevice::copy(void* to, const void* from, size_t bytes, StreamHandle stream) {
  if (bytes == 0) return;
  const ContextGuard guard(context_);
  check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, static_cast<cudaStream_t>(stream)), "cudaMemcpyAsync");
}

void CudaDevice::reduce(const std::vector<void*>& results, const std::vector<const void*>& sources, size_t count,
                        DType dtype, const Reduction& reduction, StreamHandle stream) {
  const kernels::ReducePlan plan = kernels::plan_reduction(dtype, count, reduction);
  const ReduceKernel kernel = find_reduce_kernel(plan.element, plan.combine);
  ReduceLaunch planned = plan_launch(results, sources, plan, kernel.shape);
  if (planned.blocks == 0) return;
  const ContextGuard guard(context_);
  void* parameters[] = {&planned.task};
  check(cudaLaunchKernel(kernel.function, dim3(static_cast<unsigned>(planned.blocks)), dim3(kThreads), parameters, 0,
                         static_cast<cudaStream_t>(stream)),
        "cudaLaunchKernel");
}

}  // namespace ours::cuda
