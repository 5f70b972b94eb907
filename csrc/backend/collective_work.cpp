#include "backend/collective_work.h"

#include <algorithm>

#include "backend/errors.h"
#include "backend/tensors.h"
#include "collectives/straggler_ledger.h"
#include "common/interrupts.h"
#include "common/stop_request.h"
#include "common/timeline.h"
#include "transport/stop_notice.h"

namespace ours {

CollectiveWork::CollectiveWork(Collective collective, std::shared_ptr<Group> group, std::shared_ptr<CommQueue> queue,
                               std::shared_ptr<GroupStatus> status)
    : OursWork(collective.op, group->rank(), std::move(status), collective.inputs, std::move(collective.outputs),
               collective.timeout),
      dtype_(collective.dtype),
      bytes_(bytes_of(collective.inputs)),
      body_(std::move(collective.body)),
      can_begin_(collective.can_begin),
      group_(std::move(group)),
      queue_(std::move(queue)) {}

Origin CollectiveWork::origin() const { return origin_ ? *origin_ : Origin{status().callbacks, getSequencenumber()}; }

bool CollectiveWork::tells_all() const {
  const bool reduces = op_ == Op::AllReduce || op_ == Op::AllReduceCoalesced;
  // What a device does by itself carries no notice, and nobody should wait for it.
  return (reduces || op_ == Op::Barrier) && !is_enqueued();
}

void CollectiveWork::set_sequence(uint64_t count) {
  count_ = count;
  OursWork::set_sequence(origin_ ? status().number_in_callback(*origin_, count) : count);
}

bool CollectiveWork::wait(std::chrono::milliseconds timeout) {
  // The host cannot wait for what is part of a graph, however long it may take.
  if (is_enqueued() && (timeout.count() <= 0 || device_call_->is_captured())) {
    device_call_->block_current_stream();
    if (done()) rethrow();
    return true;
  }
  // A forked child would end it in its parent's place, and a signal handler within the operation that it interrupted.
  if (!done()) status().check_caller();
  {
    const timeline::Phase phase("wait for the result");
    if (!queue_->wait(*this, timeout)) throw_wait_timeout(timeout);
  }
  rethrow();
  return true;
}

void CollectiveWork::synchronize() {
  if (!device_call_) return;
  if (is_enqueued()) {
    wait();
    return;
  }
  if (done()) return;
  status().check_caller();
  queue_->wait(*this, kNoTimeout);
  throw_interrupt();
}

std::vector<at::Device> CollectiveWork::devices() const {
  return device_call_ ? std::vector<at::Device>{device_call_->device()} : std::vector<at::Device>();
}

void CollectiveWork::complete_captured() noexcept {
  set_started();
  complete(nullptr);
}

void CollectiveWork::start() {
  set_started();
  stop_.emplace(stop_requested());
  Arrivals& arrivals = queue_->ledger().begin();
  // Programs call collectives of device tensors ahead of time, so that says nothing of who is late.
  arrivals_ = device_call_ ? nullptr : &arrivals;
}

Call CollectiveWork::make_call(Part part, Clock::time_point came) {
  return {op_, dtype_, getSequencenumber(), Deadline::after(getTimeout(), came), called(), arrivals_, &*stop_, part};
}

bool CollectiveWork::begin() noexcept {
  if (!can_begin_ || device_call_ || !group_->can_begin()) return false;
  try {
    start();
    body_(*group_, make_call(Part::Beginning, started()));
    begun_ = group_->has_begun();
  } catch (const std::exception&) {  // which execute() meets again
  }
  return begun_;
}

bool CollectiveWork::ends_quietly() {
  return group_->have_all_begun() && !has_callbacks() && !status().has_hooks_on_ends();
}

CollectiveWork::Clock::duration CollectiveWork::lain(Clock::time_point came) const {
  if (!begun_) return Clock::duration::zero();
  const auto last = called() + std::chrono::microseconds(arrivals_->at(arrivals_->last()));
  return std::max(came - std::max(started(), last), Clock::duration::zero());
}

void CollectiveWork::attend() const {
  if (!done() && !status().is_forked_child()) queue_->attend();
}

c10::intrusive_ptr<c10::ivalue::Future> CollectiveWork::getFuture() {
  auto future = OursWork::getFuture();
  attend();
  return future;
}

bool CollectiveWork::execute(bool awaited) noexcept {
  std::exception_ptr error;
  std::optional<timeline::Phase> phase;
  if (begun_) {
    phase.emplace("wait for the result");
  } else {
    start();
  }
  const auto came = begun_ ? Clock::now() : started();
  const Call call = make_call(Part::Whole, came);
  try {
    if (device_call_) {
      device_call_->run(body_, call);
    } else {
      body_(*group_, call);
    }
  } catch (...) {
    error = std::current_exception();
    if (device_call_) device_call_->context().release_after_failure(std::make_shared<decltype(body_)>(body_));
    // The group knows it already if one of its operations threw this. Otherwise the peers must hear of it: of a call
    // that has no meaning here if they make it, and of everything else in any case.
    if (error_type_of(error) != c10d::ErrorType::SUCCESS) {
      group_->fail(error);
    } else {
      group_->refuse(call, message_of(error));
    }
  }
  // Staging memory is not needed any more, however long the user keeps the Work.
  body_ = nullptr;
  // The operation ends with its last rank, not when somebody at last comes for the result.
  const auto ended = Clock::now() - lain(came);
  queue_->ledger().add({called(), ended, bytes_, awaited ? queue_->last_sequence() : 0});
  if (tells_all()) queue_->stops().note_ended(count_, !error && stop_->told());
  return complete(error, ended);
}

void CollectiveWork::in_stream(const std::function<void()>& body) const {
  if (!device_call_) return body();
  device_call_->on_stream(body);
}

}  // namespace ours
