#include "backend/work.h"

#include <ATen/record_function.h>

#include <utility>

#include "backend/callback.h"
#include "backend/errors.h"
#include "backend/interruptible.h"
#include "backend/profiling.h"
#include "backend/tensors.h"
#include "collectives/call_number.h"
#include "common/error.h"
#include "common/own_name.h"
#include "common/timeline.h"

namespace ours {

namespace {

/// Whether a profiler wants c10d::Work's event, which that otherwise makes in vain for each Work that has a title.
bool is_profiled() { return at::getStepCallbacksUnlessEmpty(at::RecordScope::USER_SCOPE).has_value(); }

}  // namespace

c10::intrusive_ptr<c10d::Work> completed_work() {
  auto future = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
  future->markCompleted(c10::IValue(std::vector<at::Tensor>()));
  return c10d::Work::create_from_future(future);
}

OursWork::OursWork(Op op, int rank, std::shared_ptr<GroupStatus> status, const std::vector<at::Tensor>& inputs,
                   Outputs outputs, std::chrono::milliseconds requested_timeout)
    : c10d::Work(rank, op_facts(op).type, is_profiled() ? op_facts(op).title : nullptr,
                 is_profiled() ? std::optional(inputs) : std::nullopt),
      op_(op),
      status_(std::move(status)),
      outputs_(std::move(outputs)),
      key_(status_->new_key()),
      timeout_(status_->timeouts.assign(requested_timeout, key_)) {}

bool OursWork::isSuccess() const { return done() && exception() == nullptr; }

std::exception_ptr OursWork::exception() const { return done() ? exception_ : nullptr; }

std::vector<at::Tensor> OursWork::result() {
  TORCH_CHECK(done() || !devices().empty(), name_of(op_), " has not completed: call wait() before result()");
  TORCH_CHECK(outputs_.size() <= 1, "the result of ", name_of(op_), " is a list of lists: use get_future().value()");
  return outputs_.empty() ? std::vector<at::Tensor>() : outputs_.front();
}

c10::intrusive_ptr<c10::ivalue::Future> OursWork::getFuture() {
  std::lock_guard<std::mutex> lock(mutex_);
  if (future_) return future_;
  c10::TypePtr type = c10::ListType::create(c10::TensorType::get());
  if (outputs_.size() > 1) type = c10::ListType::create(type);
  auto future = c10::make_intrusive<c10::ivalue::Future>(type, devices());
  // Nobody has a callback on it yet, so this runs no foreign code under the lock.
  if (is_enqueued()) {
    in_stream([&] { settle(*future); });
  } else if (done()) {
    settle(*future);
  }
  future_ = std::move(future);  // not before, since a stream may refuse, and the next call must not find it unsettled
  return future_;
}

float OursWork::getDuration() const {
  TORCH_CHECK(done(), name_of(op_), " has not completed: call wait() before asking for its duration");
  return std::chrono::duration<float, std::milli>(ended_ - started_).count();
}

std::optional<Interval> OursWork::interval() const {
  if (!done()) return std::nullopt;
  return Interval{steady_ns(started_), steady_ns(ended_)};
}

void OursWork::set_started() {
  started_ = Clock::now();
  if (flight_) status_->flights->started(*flight_);
}

std::vector<at::Device> OursWork::devices() const {
  for (const auto& tensors : outputs_) {
    if (!tensors.empty() && !tensors.front().device().is_cpu()) return {tensors.front().device()};
  }
  return {};
}

void OursWork::settle(c10::ivalue::Future& future) const {
  if (const std::exception_ptr error = exception()) {
    future.setError(error);
  } else if (outputs_.size() > 1) {
    future.markCompleted(c10::IValue(outputs_));
  } else {
    future.markCompleted(c10::IValue(outputs_.empty() ? std::vector<at::Tensor>() : outputs_.front()));
  }
}

void OursWork::add_to_timeline() const {
  const Interval when{steady_ns(started_), steady_ns(ended_)};
  uint64_t bytes = 0;
  for (const auto& tensors : outputs_) bytes += bytes_of(tensors);
  std::string arguments =
      R"("call":)" + timeline::quoted(describe_number(sequence_)) + R"(,"bytes":)" + std::to_string(bytes);
  if (!outputs_.empty() && !outputs_.front().empty()) {
    arguments += R"(,"dtype":)" + timeline::quoted(c10::toString(outputs_.front().front().scalar_type()));
  }
  if (!status_->where().empty()) arguments += R"(,"group":)" + timeline::quoted(status_->where());
  if (op_ == Op::Send || op_ == Op::Recv || op_ == Op::RecvAnySource) {
    timeline::add_overlapping("message", name_of(op_), when, arguments);
    return;
  }
  if (has_begun_before()) {
    timeline::add_overlapping("collective", name_of(op_), when, arguments);
  } else {
    timeline::add("collective", name_of(op_), when, arguments);
  }
  if (bytes == 0 || when.ended <= when.began) return;
  constexpr const char* kQuantity = "collectives, GB/s";
  timeline::count(kQuantity, when.began, static_cast<double>(bytes) / static_cast<double>(when.ended - when.began));
  timeline::count(kQuantity, when.ended, 0);
}

bool OursWork::complete(const std::exception_ptr& error, Clock::time_point ended) noexcept {
  ended_ = ended;
  if (timeline::is_on()) add_to_timeline();
  // The abort hooks want to see the state before anything reacts to the failure.
  const std::exception_ptr seen = error ? status_->note_error(error) : nullptr;
  status_->timeouts.completed(key_);
  // As c10d::Work::finish(), but under one lock with the look at the future: getFuture() completes a later one itself.
  if (recordFunctionEndCallback_) std::exchange(recordFunctionEndCallback_, nullptr)();
  bool calls = false;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    completed_ = true;
    exception_ = seen;
    done_.store(true, std::memory_order_release);
    calls = has_callbacks(lock);
  }
  cv_.notify_all();
  if (error == nullptr) tell_hooks();
  return calls;
}

bool OursWork::has_callbacks() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return has_callbacks(lock);
}

bool OursWork::has_callbacks(const std::lock_guard<std::mutex>& /*held*/) const {
  return future_ && !future_->completed();
}

void OursWork::run_callbacks() noexcept {
  if (!has_callbacks()) return;
  const Callback::Running none(nullptr);
  try {
    // The future of a failed Work has only an error, and the device may refuse any request. Otherwise the future notes
    // the current stream, and makes those of its callbacks wait for that one: no other may be held up.
    if (exception()) return settle(*future_);  // never replaced once it is set
    in_stream([this] { settle(*future_); });
  } catch (const std::exception& e) {
    TORCH_WARN("a callback on the future of ", name_of(op_), " raised: ", e.what());
  }
}

void OursWork::watch_future(TransferLimit& limit) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (watched_ || done()) return;
    watched_ = true;
  }
  // Weak, because the Work owns the limit. The Work exists until the transfer has ended.
  const auto weak = c10::weak_intrusive_ptr<OursWork>(c10::intrusive_ptr<OursWork>::reclaim_copy(this));
  limit.watch([weak](const std::exception_ptr& error) {
    const auto self = weak.lock();
    if (!self || !self->has_callbacks()) return;
    const Callback::Running none(nullptr);
    self->future_->setErrorIfNeeded(to_torch(error, self->status_->where()));
  });
}

void OursWork::tell_hooks() noexcept {
  if (flight_) status_->flights->completed(*flight_, getDuration());
  status_->completion_hooks.call(key_, getDuration());
  if (!status_->on_completion) return;
  try {
    status_->on_completion(
        std::make_shared<c10d::WorkInfo>(retrieveOpType(), sequence_, started_, ended_, ended_ - started_));
  } catch (const std::exception& e) {
    TORCH_WARN("the on-completion hook raised after ", name_of(op_), ": ", e.what());
  }
}

void OursWork::rethrow() const {
  throw_interrupt();
  if (const std::exception_ptr error = exception()) {
    status_->told = true;
    std::rethrow_exception(error);
  }
}

void OursWork::interrupt(const std::string& name) const {
  status_->fail_group(std::make_exception_ptr(
      Error(describe_interrupt(describe_own(rank_), name, std::string("while it waited for ") + name_of(op_)))));
}

bool OursWork::await_done(std::chrono::milliseconds timeout) {
  if (done()) return true;
  const Deadline deadline = timeout.count() > 0 ? Deadline::after(timeout) : Deadline::never();
  std::unique_lock<std::mutex> lock(mutex_);
  const std::string name = await_interruptibly(cv_, lock, deadline, [this] { return done(); });
  lock.unlock();
  if (!name.empty()) {
    interrupt(name);
    throw_interrupt();
  }
  return done();
}

void OursWork::throw_wait_timeout(std::chrono::milliseconds waited) const {
  C10_THROW_ERROR(DistBackendError,
                  c10::str("Operation timed out! wait() gave up on ", name_of(op_), ' ', describe_number(sequence_),
                           " after ", waited.count(), " ms. The operation goes on (its own timeout is ",
                           timeout_.count(), " ms): wait again, or abort the group", status_->where()));
}

}  // namespace ours
