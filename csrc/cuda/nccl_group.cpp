#include "cuda/nccl_group.h"

#include <algorithm>
#include <thread>
#include <utility>

#include "common/background_thread.h"
#include "device/keep_forever.h"

namespace ours::cuda {
namespace {

// An orderly end takes no longer where all ranks leave; who leaves alone does not wait for the others.
constexpr std::chrono::milliseconds kFarewell{200};
// NCCL frees a communicator in less, unless it waits for a peer that has died, or for a device that hangs.
constexpr std::chrono::milliseconds kFreeing{1000};
constexpr std::chrono::microseconds kNap{20};

}  // namespace

NcclGroup::NcclGroup(std::shared_ptr<NcclApi> api, std::shared_ptr<Group> host, std::shared_ptr<Device> device,
                     size_t scratch_bytes)
    : HostedGroup(std::move(host), std::move(device)), api_(std::move(api)), scratch_bytes_(scratch_bytes) {
  stream_ = this->device().make_stream();
  event_ = this->device().make_event();
  scratch_ = this->device().memory(scratch_bytes_);
  joined_ = this->device().memory(scratch_bytes_);
}

std::shared_ptr<NcclGroup> NcclGroup::make(std::shared_ptr<NcclApi> api, std::shared_ptr<Group> host,
                                           std::shared_ptr<Device> device, Deadline deadline, size_t scratch_bytes) {
  std::shared_ptr<NcclGroup> group(new NcclGroup(std::move(api), std::move(host), std::move(device), scratch_bytes));
  group->connect(deadline);
  return group;
}

void NcclGroup::connect(Deadline deadline) {
  const Call call{Op::Broadcast, DType::UInt8, 0, deadline};
  const Running run{call, record_of(call)};
  check_usable(call);
  HostedGroup::guarded(run, [&] {
    NcclId id{};
    if (rank() == 0) id = api_->make_id();
    host().broadcast(call, Span{id.data(), id.size()}, 0);
    api_->init(size(), id, rank(), comm_);
    at_ = {comm_, stream_->handle()};
    give(run, [] {});
  });
}

NcclGroup::~NcclGroup() { end(); }

void NcclGroup::guarded(const Running& run, const std::function<void()>& body) {
  HostedGroup::guarded(run, [&] {
    body();
    if (run.record.op != static_cast<uint8_t>(Op::Barrier)) finish(run);
  });
}

void NcclGroup::check_peers(const Running& run) {
  if (!host().failure().empty()) host().barrier(run.call);
}

void NcclGroup::give(const Running& run, const std::function<void()>& calls) {
  calls();
  while (!api_->ready(comm_)) {
    check_peers(run);
    if (run.call.deadline.passed()) {
      throw TimeoutError("NCCL did not begin " + describe_record(run.record) + " on rank " + std::to_string(rank()) +
                         " within " + std::to_string(run.call.deadline.timeout().count()) +
                         " ms: a peer is late, or cannot be reached by it (NCCL_DEBUG=INFO says more)");
    }
    std::this_thread::sleep_for(kNap);
  }
}

void NcclGroup::give_group(const Running& run, const std::function<void()>& calls) {
  give(run, [&] {
    api_->begin_group();
    try {
      calls();
    } catch (...) {
      try {
        api_->end_group();  // else the thread's later calls would be taken for part of it
      } catch (const DeviceError&) {
        // The first error is the one to tell.
      }
      throw;
    }
    api_->end_group();
  });
}

void NcclGroup::finish(const Running& run) {
  event_->record(stream_->handle());
  const auto look_around = [&] {
    check_peers(run);
    api_->ready(comm_);
  };
  wait_reached(*event_, run.call.deadline, look_around,
               "NCCL's part of " + describe_record(run.record) + " on rank " + std::to_string(rank()));
}

void NcclGroup::copy(void* to, const void* from, size_t bytes) {
  if (bytes != 0 && to != from) device().copy(to, from, bytes, stream_->handle());
}

bool NcclGroup::drop(bool in_order) noexcept {
  if (comm_ == nullptr) return stream_ != nullptr;
  try {
    const auto end = [api = api_, comm = std::exchange(comm_, nullptr), in_order] {
      if (in_order) return api->destroy(comm);
      api->abort(comm);
    };
    if (ends_in_background("ours_nccl_end", end, kFreeing)) return true;
  } catch (const std::exception&) {
    // There can be no more threads, and on this one it might never return.
  }
  keep_forever(std::shared_ptr<DeviceStream>(std::move(stream_)));
  keep_forever(std::shared_ptr<DeviceEvent>(std::move(event_)));
  return false;
}

bool NcclGroup::settle(std::chrono::milliseconds patience) noexcept {
  if (!drop(false)) return false;
  try {
    event_->record(stream_->handle());
  } catch (const std::exception&) {
    return false;
  }
  return settles(*event_, patience);
}

void NcclGroup::let_go(bool settled) noexcept {
  if (in_child()) return;
  if (!settled) {
    keep_forever(scratch_);
    keep_forever(joined_);
  }
  if (comm_ == nullptr) return;
  // Ranks of a group that has failed do not all come to an orderly end.
  if (!host().failure().empty()) {
    drop(false);
    return;
  }
  try {
    api_->finalize(comm_);
    const Deadline farewell = Deadline::after(kFarewell);
    bool in_order = api_->ready(comm_);
    while (!in_order && !farewell.passed()) {
      std::this_thread::sleep_for(kNap);
      in_order = api_->ready(comm_);
    }
    drop(in_order);
  } catch (const std::exception&) {
    drop(false);
  }
}

}  // namespace ours::cuda
