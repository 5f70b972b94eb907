#include <c10/core/CPUAllocator.h>
#include <c10/util/Exception.h>

#include <array>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <vector>

#include "device/device_library.h"
#include "stand_in_torch.h"

// Devices, streams and memory.

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

void note_use(const c10::DataPtr& memory, c10::Stream stream) {
  if (memory.get_deleter() != &release) return;
  auto* const block = static_cast<Block*>(memory.get_context());
  const std::lock_guard<std::mutex> lock(block->mutex);
  block->streams.push_back(handle_of(stream));
}

}  // namespace stand_in
