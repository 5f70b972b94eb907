#include "backend/collective_work.h"

#include <utility>

#include "backend/errors.h"
#include "backend/unlocked.h"
#include "common/interrupts.h"

namespace ours {

CollectiveWork::CollectiveWork(Collective collective, std::shared_ptr<Group> group, std::shared_ptr<CommQueue> queue,
                               std::shared_ptr<GroupStatus> status)
    : OursWork(collective.op, group->rank(), std::move(status), collective.inputs, std::move(collective.outputs),
               collective.timeout),
      dtype_(collective.dtype),
      body_(std::move(collective.body)),
      group_(std::move(group)),
      queue_(std::move(queue)) {}

Origin CollectiveWork::origin() const { return origin_ ? *origin_ : Origin{status().callbacks, getSequencenumber()}; }

void CollectiveWork::set_sequence(uint64_t count) {
  OursWork::set_sequence(origin_ ? status().number_in_callback(*origin_, count) : count);
}

bool CollectiveWork::wait(std::chrono::milliseconds timeout) {
  if (timeout.count() <= 0 && may_hold_stream() && device_call_->hold_current_stream()) {
    if (done()) rethrow();
    return true;
  }
  if (!queue_->wait(*this, timeout)) throw_wait_timeout(timeout);
  rethrow();
  return true;
}

void CollectiveWork::synchronize() {
  if (!device_call_ || done()) return;
  run_unlocked([this] {
    if (!may_hold_stream() || !device_call_->hold_current_stream()) queue_->wait(*this, kNoTimeout);
  });
  throw_interrupt();
}

std::vector<at::Device> CollectiveWork::devices() const {
  return device_call_ ? std::vector<at::Device>{device_call_->device()} : std::vector<at::Device>();
}

bool CollectiveWork::may_hold_stream() const {
  // A stream need not wait for a collective that has ended, since the device has finished with it.
  return device_call_ && !device_call_->blocks_host() && !done() && !device_call_->is_first();
}

void CollectiveWork::execute() noexcept {
  set_started();
  std::exception_ptr error;
  const Call call{op_, dtype_, getSequencenumber(), Deadline::after(getTimeout())};
  try {
    if (device_call_) {
      device_call_->run(body_, call);
      // Streams need not wait for the hooks that complete() calls.
      device_call_->open();
    } else {
      body_(*group_, call);
    }
  } catch (...) {
    error = std::current_exception();
    // If one of the group's operations threw this, the group knows it already. Otherwise the peers have to be told: of
    // an invalid call only if they make the same call, and of everything else in any case.
    if (error_type_of(error) != c10d::ErrorType::SUCCESS) {
      group_->fail(error);
    } else {
      group_->refuse(call, message_of(error));
    }
  }
  // Staging memory is not needed any more, however long the user keeps the Work.
  if (!device_call_) body_ = nullptr;
  complete(error);
  if (!device_call_) return;
  // This also runs after a failure, and when the error can be seen: no stream may stay held.
  device_call_->open();
  device_call_->disposal()->drop([body = std::exchange(body_, nullptr)] {});
}

void CollectiveWork::drop(c10::intrusive_ptr<CollectiveWork> work) {
  if (!work->device_call_) return;
  const std::shared_ptr<Disposal> disposal = work->device_call_->disposal();
  disposal->drop([work = std::move(work)] {});
}

void CollectiveWork::run_callbacks() noexcept {
  // The future of a failed Work has only an error, and the device may refuse any request.
  if (!device_call_ || exception()) return OursWork::run_callbacks();
  try {
    // The future records the current stream, for which its callbacks then wait: no other stream may be held up.
    device_call_->on_own_stream([this] { OursWork::run_callbacks(); });
  } catch (const std::exception& e) {
    TORCH_WARN("the callbacks on the future of ", name_of(op_), " did not run: ", e.what());
  }
}

}  // namespace ours
