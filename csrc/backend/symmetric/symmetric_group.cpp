#include "backend/symmetric/symmetric_group.h"

#include <unistd.h>

#include <algorithm>

#include "backend/joining/connect.h"
#include "common/process_wide.h"

namespace ours {

namespace {

struct Groups {
  std::vector<std::weak_ptr<SymmetricGroup>> all;

  void in_child() { all.clear(); }
};

}  // namespace

std::shared_ptr<SymmetricGroup> SymmetricGroup::join(const Meeting& meeting) {
  std::shared_ptr<SymmetricGroup> made(new SymmetricGroup(meeting));
  auto& groups = ProcessWide<Groups>::get();
  const std::lock_guard<std::mutex> lock(groups.mutex);
  auto& all = groups.value.all;
  all.erase(std::remove_if(all.begin(), all.end(), [](const auto& one) { return one.expired(); }), all.end());
  all.push_back(made);
  return made;
}

void SymmetricGroup::leave_all() noexcept {
  std::vector<std::shared_ptr<SymmetricGroup>> left;
  {
    auto& groups = ProcessWide<Groups>::get();
    const std::lock_guard<std::mutex> lock(groups.mutex);
    for (const auto& one : groups.value.all) left.push_back(one.lock());
  }
  for (const auto& group : left) {
    if (group) group->leave();
  }
}

SymmetricGroup::SymmetricGroup(const Meeting& meeting)
    : session_(connect_node(meeting)), timeout_(meeting.timeout), group_(session_) {}

std::vector<SharedBlock> SymmetricGroup::share(Op op, const SharedBlock& own) {
  return run([&] {
    const std::lock_guard<std::mutex> lock(mutex_);
    return share_blocks(group_, next_call(op), own);
  });
}

std::shared_ptr<SymmetricBlock> SymmetricGroup::make_block(size_t bytes) {
  return run([&] {
    try {
      return SymmetricBlock::make(bytes);
    } catch (const Error& e) {
      abort(e.what());
      throw;
    }
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
