#include "collectives/node/node_group.h"

#include "collectives/node/node_algorithms.h"
#include "common/error.h"

namespace ours {

NodeGroup::NodeGroup(std::shared_ptr<NodeSession> session, const std::string& rules, Setting write_around)
    : session_(std::move(session)),
      rounds_(session_, write_around),
      reductions_(Selection::parse(rules).by_size(Selectable::NodeReduce, 1, session_->size())) {}

void NodeGroup::guarded(const Running& /*run*/, const std::function<void()>& body) {
  rounds_.places().forget();
  try {
    body();
    rounds_.places().end();
  } catch (...) {
    session_->failure().fail(std::current_exception());
    rounds_.places().withdraw();
    rounds_.places().end();
    session_->failure().check();  // all ranks report the failure that was recorded first
    throw;
  }
}

void NodeGroup::check_usable(const Call& /*call*/) {
  // NodeRounds::open() looks at the failure of what has begun.
  if (!rounds_.has_begun()) session_->failure().check();
}

void NodeGroup::do_reduce(const Running& run, const Reducing& job) {
  const size_t bytes = job.in.count() * size_of(run.call.dtype);
  // An array that does not fit into a stage takes several rounds, whatever the table says.
  const Algorithm chosen = bytes <= rounds_.chunk_bytes() ? reductions_.choose(bytes) : Algorithm::Direct;
  switch (chosen) {
    case Algorithm::Whole:
      if (bytes > NodeRounds::kLineBytes) rounds_.reserve_beginning(bytes);
      return node::reduce_whole(rounds_, run, job);
    case Algorithm::Direct:
      if (run.call.part == Part::Beginning) return;  // it is long, and takes several rounds
      return node::reduce_direct(rounds_, run, job);
    case Algorithm::Doubling:
    case Algorithm::Ring:
      break;
  }
  throw Error(std::string("no node reduces by the algorithm ") + name_of(chosen));
}

void NodeGroup::do_reduce_scatter(const Running& run, const Scattering& job) {
  rounds_.reserve();
  node::reduce_scatter(rounds_, run, job);
}

void NodeGroup::do_exchange(const Running& run, const ExchangePlan& plan) { node::exchange(rounds_, run, plan); }

void NodeGroup::monitored_barrier(const Call& call, bool wait_all_ranks) {
  node::monitored_barrier(*session_, call, ++monitored_, wait_all_ranks);
}

std::shared_ptr<void> NodeGroup::allocate(size_t bytes) {
  // A forked child has a copy of the books over the same memory: the parent would give out again what the child took.
  return session_->in_child() ? nullptr : session_->heap().allocate(bytes);
}

MemoryUse NodeGroup::memory_use() const { return {session_->memory()->taken(), session_->heap().bytes_in_use()}; }

void NodeGroup::abort(const std::string& reason) {
  session_->failure().fail(FailureKind::Aborted, aborted(session_->describe(rank()), reason));
}

void NodeGroup::refuse(const Call& call, const std::string& why) noexcept {
  session_->refuse(call.seq, refusal_of(call, session_->describe(rank()), why));
}

}  // namespace ours
