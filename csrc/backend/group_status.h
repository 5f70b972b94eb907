#pragma once

#include <sys/types.h>

#include <atomic>
#include <condition_variable>
#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "backend/callback.h"
#include "backend/flight_recorder.h"
#include "backend/hooks.h"
#include "backend/timeouts.h"
#include "collectives/group.h"
#include "common/deadline.h"
#include "common/owning_process.h"

namespace ours {

/// The state of a process group, and the hooks that run when it changes. The group shares it with its Works, which may
/// outlive the group. It owns neither threads nor connections.
class GroupStatus : public std::enable_shared_from_this<GroupStatus> {
 public:
  /// `where` is appended to the errors of this group, for instance to name its ranks.
  GroupStatus(std::chrono::milliseconds timeout, std::string where);

  /// Throws RuntimeError in a forked child, in a signal handler, after shutdown(), and while the group has no ranks.
  void check_usable() const;
  /// Throws RuntimeError in a forked child and in a signal handler.
  void check_caller() const;

  bool is_forked_child() const { return !owner_.is_here(); }

  /// Marks a group that has no ranks until it is told which. Later operations raise RuntimeError.
  void set_without_ranks() { without_ranks_.store(true); }
  bool is_without_ranks() const { return without_ranks_.load(); }

  void set_closed() { closed_.store(true); }
  bool is_closed() const { return closed_.load(); }

  /// Records an error that ended an operation. The first one that is not just an invalid argument fails the group,
  /// unless that is closed, and runs the abort hooks. Returns the error as the type that PyTorch users catch.
  std::exception_ptr note_error(const std::exception_ptr& error);

  /// Adds a connection between the same ranks, which fails when the group fails; at once if it has failed already.
  void add_connection(const std::shared_ptr<Group>& connection);

  /// Waits until the abort hooks that note_error() started have returned. Returns false if they have not by then.
  bool wait_for_abort_hooks(Deadline deadline);

  /// Marks the group as ended by its user, so that no abort hook runs.
  void set_aborted();

  c10d::ErrorType error() const { return error_.load(); }

  const std::string& where() const { return where_; }

  /// A number for a new Work that no other Work in this process has had.
  uint64_t new_key() { return key_base_ | next_key_.fetch_add(1, std::memory_order_relaxed); }

  /// The order of the callbacks on the futures of the group's collectives. Set before any Work is made.
  std::shared_ptr<CallbackOrder> callbacks;

  /// The number of the `count`-th collective that callbacks start. It includes origin.number if `origin` is in this
  /// group.
  uint64_t number_in_callback(const Origin& origin, uint64_t count) const;

  /// Tells profilers and the FlightRecorder that an operation is about to be issued.
  std::optional<FlightLog::Entry> record(const CallTrace& call, std::chrono::milliseconds timeout) const;

  /// Null if operations are not recorded. Set before any Work is made.
  std::unique_ptr<FlightLog> flights;

  /// Whether the user knows that the group has ended: a call has thrown the error, or the user aborted the group.
  std::atomic<bool> told{false};

  Timeouts timeouts;
  HookTable<> abort_hooks;
  HookTable<uint64_t, float> completion_hooks;  ///< of a Work that has succeeded: its key, and milliseconds

  /// Called for every Work that succeeds, unless it is empty. Set before any Work is made.
  std::function<void(std::shared_ptr<c10d::WorkInfo>)> on_completion;

  /// Whether Works that succeed call functions of the user's.
  bool has_hooks_on_ends() const { return on_completion || !completion_hooks.empty(); }

  /// Fails all connections of the group with this error, here and on the peers.
  void fail_group(const std::exception_ptr& error);

 private:
  void run_abort_hooks();

  const OwningProcess owner_;
  const std::string where_;
  const uint64_t key_base_;
  std::atomic<uint64_t> next_key_{1};
  std::atomic<bool> closed_{false};
  std::atomic<bool> without_ranks_{false};
  std::atomic<c10d::ErrorType> error_{c10d::ErrorType::SUCCESS};
  std::mutex hooks_mutex_;
  std::condition_variable hooks_returned_;
  bool hooks_running_ = false;  // guarded by hooks_mutex_
  std::mutex connections_mutex_;
  std::vector<std::weak_ptr<Group>> connections_;  // guarded by connections_mutex_
  std::exception_ptr failure_;                     // guarded by connections_mutex_
};

}  // namespace ours
