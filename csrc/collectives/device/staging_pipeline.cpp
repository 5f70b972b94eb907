#include "collectives/device/staging_pipeline.h"

namespace ours {

StagingPipeline::StagingPipeline(Device& device, size_t slot_bytes)
    : slot_bytes_(slot_bytes),
      up_(device.make_stream()),
      down_(device.make_stream()),
      memory_(device.pinned_memory(kSlots * slot_bytes)) {
  for (auto* events : {&fetched_, &delivered_}) {
    for (auto& event : *events) event = device.make_event();
  }
}

void StagingPipeline::run(const Job& job) {
  const auto slot = [&](size_t k) { return static_cast<std::byte*>(memory_.get()) + k % kSlots * slot_bytes_; };
  const auto fetch = [&](size_t k) {
    // The slot's previous result must have gone up first. The device waits for that by itself.
    delivered_[k % kSlots]->block(down_->handle());
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

}  // namespace ours
