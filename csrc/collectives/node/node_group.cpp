#include "collectives/node/node_group.h"

#include "collectives/call_number.h"
#include "collectives/node/node_group_impl.h"

namespace ours {

NodeGroup::NodeGroup(std::shared_ptr<NodeSession> session, Setting write_around)
    : session_(std::move(session)), barrier_(*session_), spread_(*session_), write_(*session_, write_around) {}

std::shared_ptr<Group> make_node_group(std::shared_ptr<NodeSession> session) {
  return std::make_shared<NodeGroup>(std::move(session));
}

void NodeGroup::guarded(const Running& /*run*/, const std::function<void()>& body) {
  exposed_.reset();
  try {
    body();
  } catch (...) {
    session_->failure().fail(std::current_exception());
    withdraw();
    throw;
  }
}

void NodeGroup::do_barrier(const Running& run) {
  publish_record(run.record);
  sync(run.call, run.record);
  check_records(run.record);
}

void NodeGroup::saw_buffer(const void* data, size_t bytes) {
  const std::shared_ptr<NodeHeap>& heap = session_->heap();
  const bool in_heap = bytes >= HugePages::kLeastBytes && heap && heap->offset_of(data, bytes) != NodeHeap::kNowhere;
  if (!in_heap) pages_.saw(data, bytes);
}

std::shared_ptr<void> NodeGroup::allocate(size_t bytes) {
  const std::shared_ptr<NodeHeap> heap = session_->heap();
  // A forked child has a copy of the books over the same memory: what it took, the parent would give out again.
  // After a failure, a peer that has not noticed yet may still write to what was reduced, and has since been freed.
  if (!heap || session_->in_child() || session_->failure().failed()) return nullptr;
  return {heap->allocate(bytes), [heap](void* data) { heap->free(static_cast<std::byte*>(data)); }};
}

void NodeGroup::abort(const std::string& reason) {
  session_->failure().fail(FailureKind::Aborted,
                           session_->describe(rank()) + " aborted the group" + (reason.empty() ? "" : ": " + reason));
}

void NodeGroup::refuse(const Call& call, const std::string& why) noexcept {
  session_->refuse(call.seq, refusal_of(call, session_->describe(rank()), why));
}

void NodeGroup::publish_record(const CallRecord& record) {
  session_->self().arrival[barrier_.next_parity()].record = record;
  spread_.publish(barrier_.next_parity());
}

void NodeGroup::sync(const Call& call, const CallRecord& record) {
  barrier_.sync(call.deadline, call.seq, [&record] { return describe_record(record); });
}

void NodeGroup::check_records(const CallRecord& mine) {
  const size_t parity = barrier_.parity();
  bool agree = true;
  for (int r = 0; r < size(); ++r) agree = agree && same_record(session_->block(r).arrival[parity].record, mine);
  if (agree) {
    spread_.settle(parity);
    return;
  }

  // A rank that has refused a call goes on to the next, while the others are still at this one.
  uint64_t first = mine.seq;
  for (int r = 0; r < size(); ++r) {
    const uint64_t number = session_->block(r).arrival[parity].record.seq;
    if (count_of(number) < count_of(first)) first = number;
  }
  for (int r = 0; r < size(); ++r) {
    const std::string refusal = session_->refusal(r, first);
    if (!refusal.empty()) throw MismatchError(refusal);
  }
  std::string calls;
  std::vector<bool> told(static_cast<size_t>(size()), false);
  for (int r = 0; r < size(); ++r) {
    if (told[static_cast<size_t>(r)]) continue;
    const CallRecord record = session_->block(r).arrival[parity].record;
    calls += calls.empty() ? "" : "; ";
    for (int other = r; other < size(); ++other) {
      if (!same_record(session_->block(other).arrival[parity].record, record)) continue;
      told[static_cast<size_t>(other)] = true;
      calls += (other == r ? "" : ", ") + session_->describe(other);
    }
    calls += " called " + describe_record(record);
  }
  throw MismatchError("ranks of one group called different collectives: " + calls +
                      ". All ranks must make the same calls in the same order");
}

std::byte* NodeGroup::stage(int rank, size_t parity) const {
  return session_->at<std::byte>(session_->layout().stage(static_cast<size_t>(rank), parity));
}

std::byte* NodeGroup::result(int rank, size_t number) const {
  return session_->at<std::byte>(session_->layout().result(static_cast<size_t>(rank), number));
}

void NodeGroup::reserve_stage(size_t results) {
  if (results <= results_reserved_) return;
  const NodeLayout& layout = session_->layout();
  session_->memory()->reserve(layout.stage(static_cast<size_t>(rank()), 0), layout.stage_bytes(results));
  results_reserved_ = results;
}

}  // namespace ours
