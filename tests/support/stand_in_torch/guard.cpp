#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <memory>
#include <mutex>
#include <vector>

#include "stand_in_torch.h"

// What torch asks of a type of devices: which is the current one, its streams and events.

namespace stand_in {

namespace {

constexpr size_t kPool = 8;

c10::Stream make_stream(c10::DeviceIndex index) {
  // Kept for good, as torch's streams are.
  ours::DeviceStream* const stream = device(index).make_stream().release();
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(kType, index), reinterpret_cast<c10::StreamId>(stream->handle()));
}

/// One of a few streams, which users share as those of CUDA do.
c10::Stream pooled_stream(c10::DeviceIndex index) {
  if (index < 0) index = current_device();
  static std::mutex mutex;
  static std::vector<std::vector<c10::Stream>> pools(static_cast<size_t>(device_count()));
  static size_t next = 0;
  const std::lock_guard<std::mutex> lock(mutex);
  auto& pool = pools.at(static_cast<size_t>(index));
  if (pool.size() < kPool) pool.push_back(make_stream(index));
  return pool[next++ % pool.size()];
}

struct Guard final : public c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kType; }
  c10::Device exchangeDevice(c10::Device d) const override { return {kType, exchange_device(d.index())}; }
  c10::Device getDevice() const override { return {kType, current_device()}; }
  void setDevice(c10::Device d) const override { exchange_device(d.index()); }
  void uncheckedSetDevice(c10::Device d) const noexcept override { exchange_device(d.index()); }
  c10::Stream getStream(c10::Device d) const override { return current_stream(d.index()); }
  c10::Stream getDefaultStream(c10::Device d) const override { return c10::Stream(c10::Stream::DEFAULT, d); }
  c10::Stream getStreamFromGlobalPool(c10::Device d, bool) const override { return pooled_stream(d.index()); }
  c10::Stream getNewStream(c10::Device d, int) const override { return pooled_stream(d.index()); }
  c10::Stream exchangeStream(c10::Stream s) const override { return exchange_stream(s); }
  void* getStreamNativeHandle(const c10::Stream s) const override { return handle_of(s); }
  c10::DeviceIndex deviceCount() const noexcept override { return device_count(); }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (*event == nullptr) *event = device(stream.device_index()).make_event().release();
    static_cast<ours::DeviceEvent*>(*event)->record(handle_of(stream));
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event != nullptr) static_cast<ours::DeviceEvent*>(event)->block(handle_of(stream));
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<ours::DeviceEvent*>(event);
  }
  void synchronizeStream(const c10::Stream& s) const override { device(s.device_index()).synchronize(handle_of(s)); }
  void synchronizeDevice(const c10::DeviceIndex index) const override { synchronize(index); }
  void recordDataPtrOnStream(const c10::DataPtr& memory, const c10::Stream& stream) const override {
    note_use(memory, stream);
  }
};

struct Hooks final : public at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return device_count(); }
  c10::DeviceIndex getCurrentDevice() const override { return current_device(); }
  void setCurrentDevice(c10::DeviceIndex index) const override { exchange_device(index); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override { return exchange_device(index); }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override { return exchange_device(index); }
  // The device's copies take what the host's tensor has at the call: ordinary memory does for them.
  c10::Allocator* getPinnedMemoryAllocator() const override { return c10::GetCPUAllocator(); }
};

const bool kRegistered = [] {
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  return true;
}();

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)
REGISTER_ALLOCATOR(kType, allocator())

}  // namespace

}  // namespace stand_in
