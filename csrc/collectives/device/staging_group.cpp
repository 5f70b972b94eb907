#include "collectives/device/staging_group.h"

#include <algorithm>
#include <utility>

namespace ours {

namespace {

/// The alignment of an element, and one that the device copies well.
constexpr size_t kAlign = 64;

}  // namespace

StagingGroup::StagingGroup(std::shared_ptr<Group> host, std::shared_ptr<Device> device, size_t chunk_bytes)
    : DeviceGroupBase(std::move(host), std::move(device)),
      chunk_bytes_(chunk_bytes),
      pipeline_(this->device(), slot_bytes()) {}

StagingGroup::~StagingGroup() { end(); }

void StagingGroup::let_go() noexcept { release(pipeline_.memory()); }

void StagingGroup::copy(void* to, const void* from, size_t bytes, StreamHandle stream) {
  if (bytes != 0) device().copy(to, from, bytes, stream);
}

size_t StagingGroup::window_bytes() const {
  return std::max(chunk_bytes_ / static_cast<size_t>(size()) / kAlign * kAlign, kAlign);
}

size_t StagingGroup::slot_bytes() const {
  return std::max(chunk_bytes_, 2 * static_cast<size_t>(size()) * window_bytes());
}

StagingPipeline::Job StagingGroup::job_of(const Running& run) {
  StagingPipeline::Job job{};
  job.wait = [&](DeviceEvent& event, const char* doing) { wait(event, run, doing); };
  return job;
}

}  // namespace ours
