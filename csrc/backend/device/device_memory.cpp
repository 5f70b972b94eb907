#include "backend/device/device_memory.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <mutex>
#include <vector>

namespace ours {

namespace {

/// Memory that was dropped, and that the device may not have done with.
class Dropped {
 public:
  static Dropped& instance() {
    // Never destroyed: what is left when the program ends goes with the process.
    static Dropped* const kDropped = new Dropped;
    return *kDropped;
  }

  using Events = std::vector<std::unique_ptr<DeviceEvent>>;

  void add(Events used, std::shared_ptr<void> memory) {
    std::lock_guard<std::mutex> lock(mutex_);
    items_.push_back({std::move(used), std::move(memory)});
  }

  /// Lets go of what the device has done with.
  void collect() {
    std::vector<Item> done;
    std::lock_guard<std::mutex> lock(mutex_);
    const auto rest = std::stable_partition(items_.begin(), items_.end(), [](const Item& item) {
      try {
        return !std::all_of(item.used.begin(), item.used.end(), [](const auto& event) { return event->reached(); });
      } catch (const Error&) {
        return true;  // the device has failed
      }
    });
    std::move(rest, items_.end(), std::back_inserter(done));
    items_.erase(rest, items_.end());
  }

 private:
  struct Item {
    Events used;
    std::shared_ptr<void> memory;
  };

  std::mutex mutex_;
  std::vector<Item> items_;  // guarded by mutex_
};

StreamHandle current_stream(at::Device place) {
  const c10::impl::VirtualGuardImpl guard(place.type());
  return guard.getStreamNativeHandle(guard.getStream(place));
}

/// `home`: the stream in which the memory was given.
void drop(Device& device, at::Device place, StreamHandle home, std::shared_ptr<void> memory) noexcept {
  try {
    Dropped::Events used;
    for (const StreamHandle stream : {home, current_stream(place)}) {
      used.push_back(device.make_event());
      used.back()->record(stream);
    }
    Dropped::instance().add(std::move(used), std::move(memory));
    Dropped::instance().collect();
  } catch (const std::exception& e) {
    TORCH_WARN("memory of ", place, " that a process group gave is not used again: ", e.what());
    new std::shared_ptr<void>(std::move(memory));  // the device may still touch it
  }
}

}  // namespace

at::Tensor make_device_tensor(const std::shared_ptr<DeviceSide>& side, int64_t size, const at::TensorOptions& options) {
  const std::shared_ptr<Group> group = side->device() == options.device() ? side->made_group() : nullptr;
  if (!group || !group->allocates()) return at::empty({size}, options);
  Dropped::instance().collect();
  const size_t bytes = static_cast<size_t>(size) * options.dtype().itemsize();
  std::shared_ptr<void> memory;
  try {
    memory = group->allocate(bytes);
  } catch (const Error& error) {
    TORCH_WARN("A tensor of ", bytes, " bytes gets ordinary memory, which reductions have to copy: ", error.what());
  }
  if (!memory) return at::empty({size}, options);
  void* const data = memory.get();
  const auto release = [device = side->accelerator().shared_from_this(), place = options.device(),
                        home = current_stream(options.device()),
                        memory = std::move(memory)](void*) mutable { drop(*device, place, home, std::move(memory)); };
  return at::for_blob(data, {size}).options(options).target_device(options.device()).deleter(release).make_tensor();
}

}  // namespace ours
