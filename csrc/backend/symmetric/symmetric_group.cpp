#include "backend/symmetric/symmetric_group.h"

#include <unistd.h>

#include "backend/joining/connect.h"

namespace ours {

SymmetricGroup::SymmetricGroup(const Meeting& meeting)
    : session_(connect_node(meeting)), timeout_(meeting.timeout), group_(session_) {}

std::vector<SharedBlock> SymmetricGroup::share(Op op, const SharedBlock& own) {
  return run([&] {
    const std::lock_guard<std::mutex> lock(mutex_);
    return share_blocks(group_, next_call(op), own);
  });
}

void SymmetricGroup::meet(Op op) {
  run([&] {
    const std::lock_guard<std::mutex> lock(mutex_);
    group_.barrier(next_call(op));
  });
}

void SymmetricGroup::check_caller() const {
  TORCH_CHECK(!session_->in_child(), "this process (pid ", ::getpid(),
              ") was forked from one that shares symmetric memory with its peers. It has a copy of its own of that "
              "memory, and cannot synchronise with them: make the tensors and call rendezvous() in the child");
  TORCH_CHECK(!in_signal_handler(),
              "a signal handler that interrupted an operation cannot synchronise with other ranks, because that "
              "operation has not finished: set a flag in the handler, and check it between operations");
}

}  // namespace ours
