#include "collectives/device/staging_pipeline.h"

#include "collectives/device/hosted_group.h"
#include "device/keep_forever.h"

namespace ours {

StagingPipeline::StagingPipeline(Device& device, size_t slot_bytes)
    : up_(device.make_stream()), down_(device.make_stream()) {
  for (auto* events : {&fetched_, &delivered_}) {
    for (auto& event : *events) event = device.make_event();
  }
  for (auto& slot : slots_) slot = device.pinned_memory(slot_bytes);
}

void StagingPipeline::run(const Job& job) {
  const auto slot = [&](size_t k) { return static_cast<std::byte*>(slots_[k % kSlots].get()); };
  const auto fetch = [&](size_t k) {
    // What the slot had before has to be up. The device waits for that by itself.
    delivered_[k % kSlots]->hold(down_->handle());
    job.fetch(k, slot(k), down_->handle());
    fetched_[k % kSlots]->record(down_->handle());
  };
  fetch(0);
  for (size_t k = 0; k < job.steps; ++k) {
    if (k + 1 < job.steps) fetch(k + 1);
    job.wait(*fetched_[k % kSlots], "a copy from the device");
    job.exchange(k, slot(k));
    job.deliver(k, slot(k), up_->handle());
    delivered_[k % kSlots]->record(up_->handle());
  }
  job.wait(*delivered_[(job.steps - 1) % kSlots], "a copy to the device");
}

bool StagingPipeline::settle(std::chrono::milliseconds patience) noexcept {
  try {
    fetched_[0]->record(down_->handle());
    delivered_[0]->record(up_->handle());
  } catch (const std::exception&) {
    return false;
  }
  return settles(*fetched_[0], patience) && settles(*delivered_[0], patience);
}

void StagingPipeline::abandon() noexcept {
  for (const auto& slot : slots_) keep_forever(slot);
}

}  // namespace ours
