#include "cuda/nccl_group.h"

#include <algorithm>
#include <system_error>
#include <thread>
#include <utility>

#include "common/background_thread.h"
#include "common/interrupts.h"
#include "device/deferred_release.h"

namespace ours::cuda {
namespace {

// An orderly end is no longer than this if all ranks leave; a rank that leaves alone does not wait for the others.
constexpr std::chrono::milliseconds kFarewell{200};
// NCCL frees a communicator in less time, unless it waits for a peer that has died, or for a device that hangs.
constexpr std::chrono::milliseconds kFreeing{1000};
constexpr std::chrono::milliseconds kNoPatience{0};
constexpr std::chrono::microseconds kNap{20};

}  // namespace

NcclGroup::NcclGroup(std::shared_ptr<NcclApi> api, std::shared_ptr<Group> host, std::shared_ptr<Device> device,
                     size_t scratch_bytes)
    : EnqueueGroup(std::move(host), std::move(device)), api_(std::move(api)), scratch_bytes_(scratch_bytes) {
  scratch_ = this->device().memory(2 * scratch_bytes_);
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
    at_ = {api_->init(size(), id, rank()), stream()};
    comm_ = at_.comm;
    give(run, [] {});
  });
}

bool NcclGroup::is_ready(const Call& call) {
  if (const NcclComm comm = comm_) return api_->ready(comm);
  check_usable(call);
  throw AbortedError("the communicator of NCCL was aborted");
}

void NcclGroup::give(const Running& run, const std::function<void()>& calls) {
  if (comm_ != nullptr) calls();
  Interrupts interrupts;
  while (!is_ready(run.call)) {
    check_usable(run.call);
    const auto what = [&] { return describe_record(run.record) + " on rank " + std::to_string(rank()); };
    if (const std::string name = interrupts.look(); !name.empty()) {
      throw Error(describe_interrupt("rank " + std::to_string(rank()), name, "while NCCL began " + what()));
    }
    if (run.call.deadline.passed()) {
      throw TimeoutError("NCCL did not begin " + what() + " within " +
                         std::to_string(run.call.deadline.timeout().count()) +
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
  if (const NcclComm comm = comm_) api_->ready(comm);
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

void NcclGroup::abort(const std::string& reason) {
  EnqueueGroup::abort(reason);
  if (!in_child()) stop();
}

void NcclGroup::stop_device_work() noexcept {
  if (const NcclComm comm = comm_.exchange(nullptr)) end_communicator(comm, End::Abort, kFreeing);
}

void NcclGroup::let_go() noexcept {
  if (const NcclComm comm = comm_.exchange(nullptr)) {
    // NCCL does not end a communicator before the graphs that use it, which may still run.
    const bool waits_for_graphs = was_captured() && host().failure().empty();
    const bool in_order = waits_for_graphs || comes_to_an_end(comm);
    end_communicator(comm, in_order ? End::Destroy : End::Abort, waits_for_graphs ? kNoPatience : kFreeing);
  }
  release(std::move(scratch_));
}

void NcclGroup::end_communicator(NcclComm comm, End how, std::chrono::milliseconds patience) noexcept {
  // NCCL uses the stream until it has ended.
  const auto end = [api = api_, comm, how, stream = own_stream()] {
    if (how == End::Destroy) return api->destroy(comm);
    api->abort(comm);
  };
  try {
    ends_in_background("ours_nccl_end", end, patience);
  } catch (const std::system_error&) {
    // No more threads can be started, and on this one the call might never return.
    release_when([] { return false; }, own_stream());
  }
}

bool NcclGroup::comes_to_an_end(NcclComm comm) noexcept {
  // The ranks of a failed group do not all come to an orderly end.
  if (!host().failure().empty()) return false;
  try {
    api_->finalize(comm);
    const Deadline farewell = Deadline::after(kFarewell);
    while (!api_->ready(comm)) {
      if (farewell.passed()) return false;
      std::this_thread::sleep_for(kNap);
    }
    return true;
  } catch (const std::exception&) {
    return false;
  }
}

}  // namespace ours::cuda
