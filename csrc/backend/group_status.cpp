#include "backend/group_status.h"

#include <unistd.h>

#include <random>
#include <system_error>

#include "backend/errors.h"
#include "backend/recent_calls.h"
#include "collectives/call_number.h"
#include "common/background_thread.h"
#include "common/interrupts.h"
#include "common/timeline.h"

namespace ours {

namespace {

constexpr int kCounterBits = 40;

/// How long an error waits for the abort hooks: enough to record what is going on.
constexpr std::chrono::milliseconds kErrorPatience{200};

uint64_t random_key_base() {
  std::random_device device;
  return static_cast<uint64_t>(device()) << kCounterBits;
}

}  // namespace

GroupStatus::GroupStatus(std::chrono::milliseconds timeout, std::string where)
    : timeouts(timeout), where_(std::move(where)), key_base_(random_key_base()) {}

void GroupStatus::check_caller() const {
  TORCH_CHECK(!is_forked_child(), "this process (pid ", ::getpid(),
              ") was forked from the one that made the process group (pid ", owner_.pid(),
              ") and cannot use the parent's connections. Start workers with multiprocessing's 'spawn' or "
              "'forkserver', or call init_process_group in the child");
  TORCH_CHECK(!in_signal_handler(),
              "a signal handler that interrupted an operation cannot use the process group, because that operation "
              "has not finished: set a flag in the handler, and check it between operations");
}

void GroupStatus::check_usable() const {
  check_caller();
  TORCH_CHECK(
      !without_ranks_.load(), "this process group has no ranks", where_,
      ": it was made with enable_reconfigure=True and not told which, or its last reconfigure() has failed. Call "
      "reconfigure() with the handles of all ranks and a uuid that has not been used");
  TORCH_CHECK(!closed_.load(), "this process group was shut down", where_,
              "; make a new one with init_process_group or new_group");
}

std::exception_ptr GroupStatus::note_error(const std::exception_ptr& error) {
  const c10d::ErrorType type = error_type_of(error);
  auto none = c10d::ErrorType::SUCCESS;
  // What ends because this rank closes the group concerns no other: the peers may go on among themselves.
  if (type != none && !closed_ && error_.compare_exchange_strong(none, type)) {
    fail_group(error);
    timeline::flush();  // programs may end by a signal after an error
    run_abort_hooks();
  }
  return to_torch(error, where_);
}

uint64_t GroupStatus::number_in_callback(const Origin& origin, uint64_t count) const {
  return ours::number_in_callback(origin.order == callbacks ? origin.number : 0, count);
}

std::optional<FlightLog::Entry> GroupStatus::record(const CallTrace& call, std::chrono::milliseconds timeout) const {
  record_call(call);
  remember(call);
  if (!flights) return std::nullopt;
  return flights->issued(call, timeout);
}

void GroupStatus::fail_group(const std::exception_ptr& error) {
  const std::lock_guard<std::mutex> lock(connections_mutex_);
  failure_ = error;
  for (const auto& weak : connections_) {
    if (const auto connection = weak.lock()) connection->fail(error);
  }
}

void GroupStatus::add_connection(const std::shared_ptr<Group>& connection) {
  const std::lock_guard<std::mutex> lock(connections_mutex_);
  connections_.push_back(connection);
  if (failure_) connection->fail(failure_);
}

void GroupStatus::run_abort_hooks() {
  if (abort_hooks.empty()) return;
  // On a thread of their own: writing a trace of all stacks takes seconds, and the error must not wait that long.
  std::unique_lock<std::mutex> lock(hooks_mutex_);
  hooks_running_ = true;
  const auto call = [self = shared_from_this()] {
    self->abort_hooks.call();
    std::lock_guard<std::mutex> done(self->hooks_mutex_);
    self->hooks_running_ = false;
    self->hooks_returned_.notify_all();
  };
  try {
    start_background_thread("ours_abort", call);
  } catch (const std::system_error&) {
    // No thread can be started, so the hooks delay the error.
    lock.unlock();
    call();
    return;
  }
  hooks_returned_.wait_for(lock, kErrorPatience, [this] { return !hooks_running_; });
}

bool GroupStatus::wait_for_abort_hooks(Deadline deadline) {
  std::unique_lock<std::mutex> lock(hooks_mutex_);
  return hooks_returned_.wait_until(lock, deadline.at(), [this] { return !hooks_running_; });
}

void GroupStatus::set_aborted() {
  told = true;
  auto none = c10d::ErrorType::SUCCESS;
  error_.compare_exchange_strong(none, c10d::ErrorType::COMM_ERROR);
}

}  // namespace ours
