#include "collectives/device/ipc_group.h"

#include <algorithm>
#include <chrono>
#include <thread>
#include <utility>

namespace ours {

namespace {

/// Longer than a peer takes to copy a slot.
constexpr std::chrono::milliseconds kLastCopies{50};

/// The number of bytes that kernels read at once.
constexpr size_t kAlign = 16;

/// The most that a slot has. Copying that much takes as long as several turns, so more would gain little.
constexpr size_t kMostSlotBytes = size_t{128} << 20;

/// The part of a device's memory that all stages of a group on it may take. A program may have ten groups.
constexpr size_t kPartOfMemory = 64;

}  // namespace

size_t IpcGroup::stage_bytes(const std::vector<DeviceFacts>& facts) {
  size_t bytes = kMostSlotBytes;
  for (const DeviceFacts& one : facts) {
    const auto others = static_cast<size_t>(std::count_if(facts.begin(), facts.end(), [&](const DeviceFacts& other) {
      return &other != &one && other.identity == one.identity;
    }));
    bytes = std::min(bytes, others == 0 ? kSlotBytes : one.memory_bytes / kPartOfMemory / (others + 1) / kSlots);
  }
  return kSlots * std::max(bytes, kSlotBytes);
}

IpcGroup::IpcGroup(std::shared_ptr<Group> host, std::shared_ptr<Device> device, std::shared_ptr<IpcMemory> memory)
    : DeviceGroupBase(std::move(host), std::move(device)),
      memory_(std::move(memory)),
      slot_bytes_(memory_->stage_bytes() / kSlots / kAlign * kAlign),
      copies_(this->device().make_stream()),
      kernels_(this->device().make_stream()),
      copied_(this->device().make_event()),
      reduced_(this->device().make_event()) {
  const std::vector<std::string>& devices = memory_->identities();
  for (int r = 0; r < size(); ++r) {
    const auto first = std::find(devices.begin(), devices.end(), devices[static_cast<size_t>(r)]);
    driver_of_.push_back(static_cast<int>(first - devices.begin()));
    if (driver_of(r) == r) drivers_.push_back(r);
  }
}

void IpcGroup::copy(void* to, const void* from, size_t bytes) {
  if (bytes != 0) device().copy(to, from, bytes, copies_->handle());
}

void IpcGroup::wait_copied(const Running& run) {
  copied_->record(copies_->handle());
  wait(*copied_, run, "a copy");
}

void IpcGroup::wait_reduced(const Running& run) {
  if (!drives()) return;
  reduced_->record(kernels_->handle());
  wait(*reduced_, run, "the arithmetic");
}

void IpcGroup::end_call(size_t chunks) {
  next_slot_ += chunks;
  memory_->finish_call();
}

Slice IpcGroup::share_of(size_t count, size_t element) const {
  if (!drives()) return {};
  const auto number = std::find(drivers_.begin(), drivers_.end(), rank()) - drivers_.begin();
  return slice_of(count, static_cast<int>(drivers_.size()), static_cast<int>(number),
                  std::max<size_t>(kAlign / element, 1));
}

void IpcGroup::let_go() noexcept {
  // The process may end next, and with it the stage from which peers are still copying the last results, so wait for
  // as long as a copy takes.
  const auto patience = Deadline::after(kLastCopies);
  while (!memory_->have_peers_finished() && failure().empty() && !patience.passed()) std::this_thread::yield();
  release(std::move(memory_));
}

}  // namespace ours
