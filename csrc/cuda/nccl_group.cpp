#include "cuda/nccl_group.h"

#include <algorithm>
#include <thread>
#include <utility>

#include "common/background_thread.h"

namespace ours::cuda {
namespace {

// An orderly end is no longer than this if all ranks leave; a rank that leaves alone does not wait for the others.
constexpr std::chrono::milliseconds kFarewell{200};
// NCCL frees a communicator in less time, unless it waits for a peer that has died, or for a device that hangs.
constexpr std::chrono::milliseconds kFreeing{1000};
constexpr std::chrono::microseconds kNap{20};

}  // namespace

NcclGroup::NcclGroup(std::shared_ptr<NcclApi> api, std::shared_ptr<Group> host, std::shared_ptr<Device> device,
                     size_t scratch_bytes)
    : EnqueueGroup(std::move(host), std::move(device)), api_(std::move(api)), scratch_bytes_(scratch_bytes) {
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
  DeviceGroupBase::guarded(run, [&] {
    NcclId id{};
    if (rank() == 0) id = api_->make_id();
    host().broadcast(call, Span{id.data(), id.size()}, 0);
    api_->init(size(), id, rank(), comm_);
    at_ = {comm_, stream()};
    give(run, [] {});
  });
}

void NcclGroup::give(const Running& run, const std::function<void()>& calls) {
  calls();
  while (!api_->ready(comm_)) {
    check_peers(run.call);
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
        api_->end_group();  // otherwise the thread's later calls would be taken for part of it
      } catch (const DeviceError&) {
        // The first error is the one to report.
      }
      throw;
    }
    api_->end_group();
  });
}

void NcclGroup::check_engine() {
  if (comm_ != nullptr) api_->ready(comm_);
}

void NcclGroup::copy(void* to, const void* from, size_t bytes) {
  if (bytes != 0 && to != from) device().copy(to, from, bytes, stream());
}

void NcclGroup::refuse_capture(const Running& run) {
  if (!device().is_capturing(stream())) return;
  withdraw_claim();
  throw InvalidArgument(std::string(name_of(run.call.op)) +
                        " with these arguments goes through memory of the group's, and cannot be captured into a "
                        "graph. Keep it out of what is captured");
}

void NcclGroup::drop(bool in_order) noexcept {
  if (comm_ == nullptr) return;
  try {
    const auto end = [api = api_, comm = std::exchange(comm_, nullptr), in_order] {
      if (in_order) return api->destroy(comm);
      api->abort(comm);
    };
    if (ends_in_background("ours_nccl_end", end, kFreeing)) return;
  } catch (const std::exception&) {
    // No more threads can be started, and on this one the call might never return.
  }
  leave_stream_behind();
}

void NcclGroup::let_go() noexcept {
  if (comm_ != nullptr) drop(comes_to_an_end());
  release(std::move(scratch_));
  release(std::move(joined_));
}

bool NcclGroup::comes_to_an_end() noexcept {
  // The ranks of a failed group do not all come to an orderly end.
  if (!host().failure().empty()) return false;
  try {
    api_->finalize(comm_);
    const Deadline farewell = Deadline::after(kFarewell);
    while (!api_->ready(comm_)) {
      if (farewell.passed()) return false;
      std::this_thread::sleep_for(kNap);
    }
    return true;
  } catch (const std::exception&) {
    return false;
  }
}

}  // namespace ours::cuda
