#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/Exception.h>

#include <array>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <vector>

#include "device/device_library.h"
#include "stand_in_torch.h"

// Devices, streams and memory, and what torch asks of a type of devices.

namespace stand_in {

namespace {

using ours::testing::StandInDevice;

constexpr size_t kMostDevices = 8;
constexpr unsigned char kGarbage = 0xc5;

thread_local c10::DeviceIndex t_device = 0;
thread_local std::array<c10::StreamId, kMostDevices> t_streams{};

std::vector<std::shared_ptr<StandInDevice>> find_devices() {
  ours::DeviceLibrary* library = ours_device_library(ours::kDeviceInterface);
  TORCH_CHECK(library != nullptr, "the stand-in devices were built for another interface; build them again");
  const size_t count = library->device_names().size();
  TORCH_CHECK(count <= kMostDevices, "at most ", kMostDevices, " stand-in devices");
  std::vector<std::shared_ptr<StandInDevice>> found;
  while (found.size() < count) {
    found.push_back(std::static_pointer_cast<StandInDevice>(library->device(static_cast<int>(found.size()))));
  }
  return found;
}

const std::vector<std::shared_ptr<StandInDevice>>& devices() {
  // Never destroyed: the threads of their streams run until the process ends.
  static const auto* const kDevices = new std::vector<std::shared_ptr<StandInDevice>>(find_devices());
  return *kDevices;
}

/// What a tensor's memory was used by.
struct Block {
  void* data = nullptr;
  size_t bytes = 0;
  c10::DeviceIndex device = 0;
  std::mutex mutex;
  std::vector<ours::StreamHandle> streams;  // guarded by mutex
};

void release(void* context) {
  std::shared_ptr<Block> block(static_cast<Block*>(context));
  const auto left = std::make_shared<std::atomic<size_t>>(block->streams.size());
  for (const ours::StreamHandle stream : block->streams) {
    device(block->device).run(stream, [block, left] {
      if (left->fetch_sub(1) != 1) return;
      std::memset(block->data, kGarbage, block->bytes);
      std::free(block->data);
    });
  }
}

class StandInAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    const c10::DeviceIndex index = current_device();
    auto block = std::make_unique<Block>();
    block->bytes = (bytes + 63) / 64 * 64 + 64;
    block->data = std::aligned_alloc(64, block->bytes);
    block->device = index;
    block->streams = {handle_of(current_stream(index))};
    std::memset(block->data, kGarbage, block->bytes);
    void* const data = block->data;
    return {data, block.release(), &release, c10::Device(kType, index)};
  }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    enqueue(current_device(), [=] { std::memcpy(to, from, bytes); });
  }
};

}  // namespace

c10::DeviceIndex device_count() { return static_cast<c10::DeviceIndex>(devices().size()); }

c10::DeviceIndex current_device() { return t_device; }

c10::DeviceIndex exchange_device(c10::DeviceIndex index) {
  TORCH_CHECK(index >= 0 && index < device_count(), "there is no stand-in device ", static_cast<int>(index));
  return std::exchange(t_device, index);
}

StandInDevice& device(c10::DeviceIndex index) {
  return *devices().at(static_cast<size_t>(index < 0 ? t_device : index));
}

c10::Stream current_stream(c10::DeviceIndex index) {
  if (index < 0) index = t_device;
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(kType, index), t_streams.at(static_cast<size_t>(index)));
}

c10::Stream exchange_stream(c10::Stream stream) {
  const c10::Stream before = current_stream(stream.device_index());
  t_streams.at(static_cast<size_t>(stream.device_index())) = stream.id();
  return before;
}

ours::StreamHandle handle_of(c10::Stream stream) { return reinterpret_cast<ours::StreamHandle>(stream.id()); }

void enqueue(c10::DeviceIndex index, std::function<void()> work) {
  device(index).run(handle_of(current_stream(index)), std::move(work));
}

void synchronize(c10::DeviceIndex index) { device(index).synchronize(handle_of(current_stream(index))); }

c10::Allocator* allocator() {
  static StandInAllocator allocator;
  return &allocator;
}

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
    if (memory.get_deleter() != &release) return;
    auto* const block = static_cast<Block*>(memory.get_context());
    const std::lock_guard<std::mutex> lock(block->mutex);
    block->streams.push_back(handle_of(stream));
  }
};

/// The device's copies take what the host's tensor has at the call: ordinary memory does for them.
struct PinnedAllocator final : public c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    device(current_device()).check_no_capture();
    return c10::GetCPUAllocator()->allocate(bytes);
  }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
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
  c10::Allocator* getPinnedMemoryAllocator() const override {
    static PinnedAllocator allocator;
    return &allocator;
  }
};

const bool kRegistered = [] {
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  return true;
}();

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)
REGISTER_ALLOCATOR(kType, allocator())

}  // namespace

}  // namespace stand_in
