#include "cuda/nccl_group.h"

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
// A call takes longer only if it is stuck. Shorter than the time within which abort() has to free all waiters.
constexpr std::chrono::milliseconds kCalling{50};
constexpr std::chrono::microseconds kNap{20};

}  // namespace

std::shared_ptr<NcclGroup> NcclGroup::make(std::shared_ptr<const Nccl> nccl, std::shared_ptr<Group> host,
                                           std::shared_ptr<Device> device, Deadline deadline) {
  std::shared_ptr<NcclGroup> group(new NcclGroup(std::move(nccl), std::move(host), std::move(device)));
  group->connect(deadline);
  return group;
}

void NcclGroup::connect(Deadline deadline) {
  const Call call{Op::Broadcast, DType::UInt8, 0, deadline};
  const Running run{call, record_of(call)};
  DeviceGroupBase::guarded(run, [&] {
    NcclId id{};
    if (rank() == 0) invoke(nccl_->get_unique_id, &id);
    host().broadcast(call, Span{id.data(), id.size()}, 0);
    ncclConfig_t config;
    config.blocking = 0;
    NcclComm begun = nullptr;
    invoke(nccl_->init, &begun, size(), id, rank(), &config);
    comm_ = begun;
    wait_begun(run);
  });
}

void NcclGroup::check(const char* what, ncclResult_t result) const {
  if (result == ncclSuccess || result == ncclInProgress) return;
  const char* const last = nccl_->last_error.run(nullptr);  // NCCL does not use the communicator here
  throw DeviceError(std::string(what) + " failed: " + nccl_->error_string.run(result) +
                    (last == nullptr || *last == '\0' ? "" : std::string(" (") + last + ")") +
                    ". NCCL_DEBUG=INFO says more");
}

NcclComm NcclGroup::comm() const {
  if (const NcclComm comm = comm_) return comm;
  throw AbortedError("the communicator of NCCL was aborted");
}

bool NcclGroup::is_ready(NcclComm comm) const {
  ncclResult_t state = ncclSuccess;
  invoke(nccl_->async_error, comm, &state);
  check("an operation of NCCL", state);
  return state != ncclInProgress;
}

void NcclGroup::give(const Running& run, const std::function<void()>& calls) {
  {
    const std::lock_guard<std::mutex> lock(calling_);
    comm();
    invoke(nccl_->group_start);
    try {
      calls();
      comm();
    } catch (...) {
      // Otherwise the thread's later calls would be taken for part of the group. But this uses the communicator, which
      // may have been freed while a call was stuck.
      if (!was_stuck_) static_cast<void>(nccl_->group_end.run());
      throw;
    }
    invoke(nccl_->group_end);
  }
  wait_begun(run);
}

void NcclGroup::wait_begun(const Running& run) {
  const auto has_begun = [&] {
    const std::lock_guard<std::mutex> lock(calling_);
    return is_ready(comm());
  };
  Interrupts interrupts;
  while (!has_begun()) {
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

void NcclGroup::check_engine() {
  const std::unique_lock<std::mutex> lock(calling_, std::try_to_lock);
  if (const NcclComm comm = comm_; lock && comm != nullptr) is_ready(comm);
}

void NcclGroup::abort(const std::string& reason) {
  EnqueueGroup::abort(reason);
  if (!in_child()) stop_device_work();
}

NcclComm NcclGroup::take_communicator() noexcept {
  const NcclComm comm = comm_.exchange(nullptr);
  for (const Deadline patience = Deadline::after(kCalling); comm != nullptr && !was_stuck_;) {
    if (const std::unique_lock<std::mutex> lock(calling_, std::try_to_lock); lock) break;
    std::this_thread::sleep_for(kNap);
    was_stuck_ = patience.passed();
  }
  return comm;
}

void NcclGroup::stop_device_work() noexcept {
  if (const NcclComm comm = take_communicator()) end_communicator(comm, nccl_->abort, kFreeing);
}

void NcclGroup::let_go() noexcept {
  if (const NcclComm comm = take_communicator()) {
    if (!can_be_destroyed(comm)) {
      end_communicator(comm, nccl_->abort, kFreeing);
    } else {
      // NCCL does not end a communicator before the graphs that use it, which may still run.
      end_communicator(comm, nccl_->destroy, was_captured() ? kNoPatience : kFreeing);
    }
  }
}

void NcclGroup::end_communicator(NcclComm comm, const Nccl::Call<NcclComm>& how,
                                 std::chrono::milliseconds patience) noexcept {
  // NCCL uses the stream until it has ended.
  const auto end = [nccl = nccl_, comm, &how, stream = own_stream()] {
    try {
      how.run(comm);
    } catch (const std::exception&) {
      // There is no context any more, and so nothing to free.
    }
  };
  try {
    ends_in_background("ours_nccl_end", end, patience);
  } catch (const std::system_error&) {
    // No more threads can be started, and on this one the call might never return.
    release_when([] { return false; }, own_stream());
  }
}

bool NcclGroup::can_be_destroyed(NcclComm comm) noexcept {
  // The ranks of a failed group do not all come to an orderly end.
  if (!host().failure().empty()) return false;
  try {
    if (!was_captured()) invoke(nccl_->finalize, comm);  // it would wait for graphs
    const Deadline farewell = Deadline::after(kFarewell);
    while (!is_ready(comm)) {
      if (farewell.passed()) return false;
      std::this_thread::sleep_for(kNap);
    }
    return true;
  } catch (const std::exception&) {
    return false;
  }
}

}  // namespace ours::cuda
