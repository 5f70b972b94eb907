#pragma once

#include <chrono>
#include <memory>
#include <mutex>
#include <vector>

#include "backend/errors.h"
#include "backend/joining/rendezvous.h"
#include "collectives/node/node_group.h"
#include "collectives/node/shared_blocks.h"
#include "common/interpreter_lock.h"
#include "common/interrupts.h"

namespace ours {

/// Ranks of one node that share symmetric memory, and what they need to agree on it. They are independent of what else
/// the ranks of a process group do: if they fail, the process group does not.
class SymmetricGroup {
 public:
  /// Blocks until all ranks have come together. Throws MisuseError if they are on several nodes, and DistBackendError
  /// if they have not come within `meeting.timeout`.
  static std::shared_ptr<SymmetricGroup> join(const Meeting& meeting);

  /// Tells the peers of all groups that this process ends. Called once, before it does.
  static void leave_all() noexcept;

  /// Makes a block that will be shared. If that fails, so do the calls of the peers, which would wait for it.
  std::shared_ptr<SymmetricBlock> make_block(size_t bytes);

  /// Calls share_blocks(). All ranks call it in the same order.
  std::vector<SharedBlock> share(Op op, const SharedBlock& own);

  /// Returns when all ranks have called it.
  void meet(Op op);

  /// Throws RuntimeError in a forked child, and in a signal handler.
  void check_caller() const;

  int rank() const { return session_->rank(); }
  int size() const { return session_->size(); }
  const std::shared_ptr<NodeSession>& session() const { return session_; }
  std::chrono::milliseconds timeout() const { return timeout_; }
  MemoryUse memory_use() const { return group_.memory_use(); }
  void leave() noexcept { group_.leave(); }
  void abort(const std::string& reason) { group_.abort(reason); }

  /// Runs an operation of these ranks, and turns its errors into those that PyTorch users catch.
  template <class Body>
  auto run(Body&& body) const -> decltype(body()) {
    check_caller();
    const WithoutInterpreterLock unlocked;
    return with_torch_errors("", [&] {
      try {
        return body();
      } catch (const Error&) {
        throw_interrupt();
        throw;
      }
    });
  }

 private:
  explicit SymmetricGroup(const Meeting& meeting);
  Call next_call(Op op) { return Call{op, DType::Opaque8, ++number_, Deadline::after(timeout_)}; }

  const std::shared_ptr<NodeSession> session_;
  const std::chrono::milliseconds timeout_;
  std::mutex mutex_;
  NodeGroup group_;      // one operation at a time, under mutex_
  uint64_t number_ = 0;  // of the last operation; guarded by mutex_
};

}  // namespace ours
