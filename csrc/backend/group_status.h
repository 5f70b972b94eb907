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
#include "common/owning_process.h"

namespace ours {

/// What is known about a group and who wants to hear of it: shared by the process group and its Works, which may
/// outlive it. Owns no thread and no communication.
class GroupStatus : public std::enable_shared_from_this<GroupStatus> {
 public:
  using OnCompletion = std::function<void(std::shared_ptr<c10d::WorkInfo>)>;

  /// `where` is appended to the errors of this group, e.g. to say which ranks it consists of.
  GroupStatus(std::chrono::milliseconds timeout, std::string where);

  /// Throws RuntimeError in a forked child, and after shutdown().
  void check_usable() const;

  bool is_forked_child() const;

  void set_closed() { closed_.store(true); }
  bool is_closed() const { return closed_.load(); }

  /// Takes note of what ended an operation: unless it is a mere misuse, the group has failed, and the abort hooks run.
  /// Returns the error as PyTorch users catch it.
  std::exception_ptr note_error(const std::exception_ptr& error);

  /// From now on what ends an operation of this group ends this connection of the same ranks, too; at once where one
  /// has failed.
  void add_connection(const std::shared_ptr<Group>& connection);

  /// Waits until the abort hooks that note_error() started have returned, at most for `limit`.
  void wait_for_abort_hooks(std::chrono::milliseconds limit);

  /// The group ends because its user wants it to: nothing to tell the abort hooks.
  void set_aborted();

  c10d::ErrorType error() const { return error_.load(); }

  const std::string& where() const { return where_; }

  /// A number for a new Work that no other Work of this group, or of another one in this process, has had.
  uint64_t new_key() { return key_base_ | next_key_.fetch_add(1, std::memory_order_relaxed); }

  /// The callbacks on the futures of the group's collectives. Set before any Work is made.
  std::shared_ptr<CallbackOrder> callbacks;

  /// The number of the collective that is the `count`-th that callbacks start, this one where they are of `origin`.
  uint64_t number_in_callback(const Origin& origin, uint64_t count) const;

  /// Null: operations are not recorded. Set before any Work is made.
  std::unique_ptr<FlightLog> flights;

  Timeouts timeouts;
  HookTable<> abort_hooks;
  HookTable<const Completion&> completion_hooks;

  /// Called with the facts of every Work that succeeds; at most one. Set before any Work is made.
  void set_on_completion(OnCompletion hook) { on_completion_ = std::make_unique<OnCompletion>(std::move(hook)); }
  const OnCompletion* on_completion() const { return on_completion_.get(); }

  /// Makes an error the failure of all connections of the group, here and on the peers.
  void fail_group(const std::exception_ptr& error);

 private:
  void run_abort_hooks();

  const OwningProcess owner_;
  const std::string where_;
  const uint64_t key_base_;
  std::atomic<uint64_t> next_key_{1};
  std::atomic<bool> closed_{false};
  std::atomic<c10d::ErrorType> error_{c10d::ErrorType::SUCCESS};
  std::unique_ptr<OnCompletion> on_completion_;
  std::mutex hooks_mutex_;
  std::condition_variable hooks_returned_;
  bool hooks_running_ = false;  // guarded by hooks_mutex_
  std::mutex connections_mutex_;
  std::vector<std::weak_ptr<Group>> connections_;  // guarded by connections_mutex_
  std::exception_ptr failure_;                     // guarded by connections_mutex_
};

}  // namespace ours
