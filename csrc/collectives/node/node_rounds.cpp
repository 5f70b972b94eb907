#include "collectives/node/node_rounds.h"

#include <utility>
#include <vector>

#include "collectives/call_number.h"
#include "common/error.h"
#include "common/interval.h"
#include "transport/stop_notice.h"

namespace ours {

NodeRounds::NodeRounds(std::shared_ptr<NodeSession> session, Setting write_around)
    : session_(std::move(session)),
      barrier_(*session_),
      spread_(*session_),
      write_(*session_, write_around),
      places_(*session_, barrier_) {}

CallRecord NodeRounds::shown(const Running& run) const {
  // Where the sizes of all parts must agree, and not only their sum, the record has no place for both.
  CallRecord record = run.record;
  if (run.fingerprint != 0) record.count = run.fingerprint;
  return record;
}

void NodeRounds::arrive(const Running& run) {
  const size_t parity = barrier_.next_parity();
  session_->self().arrival[parity].record = shown(run);
  session_->self().arrival[parity].called = static_cast<uint32_t>(steady_us(run.call.called));
  show_stop(run);
  spread_.publish(parity);
  barrier_.arrive();
  begun_on_ = std::this_thread::get_id();
}

bool NodeRounds::open(const Running& run) {
  if (!std::exchange(begun_, false)) {
    arrive(run);
  } else if (!all_have_begun()) {
    session_->failure().check();  // what all ranks have begun ends well on all of them, whatever has come after it
  }
  begun_ = run.call.part == Part::Beginning;
  if (begun_) return false;
  barrier_.await(run.call.deadline, run.call.seq, [&run] { return describe_record(run.record); });
  check_records(shown(run));
  hear_stop(run);
  if (run.call.arrivals != nullptr) note_arrivals(*run.call.arrivals, SinceCall(run.call.called));
  // The thread that began has said where it runs.
  if (begun_on_ == std::this_thread::get_id()) spread_.settle(barrier_.parity());
  return true;
}

void NodeRounds::sync(const Running& run) {
  barrier_.sync(run.call.deadline, run.call.seq, [&run] { return describe_record(run.record); });
}

void NodeRounds::sync_and_pass_on(const Running& run) {
  show_stop(run);
  sync_and_pass_arrivals(run);
  hear_stop(run);
}

void NodeRounds::show_stop(const Running& run) {
  const bool known = run.call.stop != nullptr && run.call.stop->show();
  session_->self().arrival[barrier_.next_parity()].record.stop = known ? 1 : 0;
}

void NodeRounds::hear_stop(const Running& run) {
  if (run.call.stop == nullptr) return;
  for (int r = 0; r < size(); ++r) run.call.stop->hear(session_->block(r).arrival[barrier_.parity()].record.stop != 0);
}

void NodeRounds::sync_and_pass_arrivals(const Running& run) {
  Arrivals* const arrivals = run.call.arrivals;
  if (arrivals == nullptr || size() == 1) return sync(run);
  int last = -1;
  for (NodeArrival& arrival : session_->self().came_last[barrier_.next_parity()]) {
    if (last = arrivals->last(last); last >= 0) {
      arrival = {last, static_cast<uint32_t>(steady_us(run.call.called) + arrivals->at(last))};
    } else {
      arrival = {-1, 0};
    }
  }
  sync(run);
  const SinceCall since_call(run.call.called);
  for (int r = 0; r < size(); ++r) {
    for (const NodeArrival& arrival : session_->block(r).came_last[barrier_.parity()]) {
      if (r == rank() || arrival.rank < 0) continue;
      arrivals->note(arrival.rank, since_call(arrival.called));
    }
  }
}

void NodeRounds::check_records(const CallRecord& mine) {
  const size_t parity = barrier_.parity();
  bool agree = true;
  for (int r = 0; r < size(); ++r) agree = agree && same_record(session_->block(r).arrival[parity].record, mine);
  if (!agree) throw_mismatch(mine);
}

void NodeRounds::note_arrivals(Arrivals& arrivals, SinceCall since_call) {
  for (int r = 0; r < size(); ++r) {
    if (r == rank()) continue;
    arrivals.note(session_->number_of(r), since_call(session_->block(r).arrival[barrier_.parity()].called));
  }
}

void NodeRounds::throw_mismatch(const CallRecord& mine) {
  const auto record_of_rank = [&](int r) { return session_->block(r).arrival[barrier_.parity()].record; };
  // A rank that has refused a call goes on to the next one, while the others are still at this one.
  uint64_t first = mine.seq;
  for (int r = 0; r < size(); ++r) {
    const uint64_t number = record_of_rank(r).seq;
    if (count_of(number) < count_of(first)) first = number;
  }
  for (int r = 0; r < size(); ++r) {
    const std::string refusal = session_->refusal(r, first);
    if (!refusal.empty()) throw MismatchError(refusal);
  }
  const auto same = [&](int a, int b) { return same_record(record_of_rank(a), record_of_rank(b)); };
  const std::string calls =
      calls_of_ranks(size(), record_of_rank, same, [this](int r) { return session_->describe(r); });
  // Of many ranks, the first that differ from rank 0, and that one.
  std::vector<int> asked;
  for (int r = 0; r < size(); ++r) {
    if (r == 0 || size() <= static_cast<int>(kMostAsked) || !same(0, r)) asked.push_back(r);
  }
  throw MismatchError(different_calls(calls) + session_->call_roll(asked));
}

void NodeRounds::reserve_more(size_t results) {
  const NodeLayout& layout = session_->layout();
  session_->memory()->reserve(layout.stage(static_cast<size_t>(rank()), 0), layout.stage_bytes(results));
  reserved_ = results;
}

void NodeRounds::note_use(const void* data, size_t bytes) {
  const std::shared_ptr<NodeHeap>& heap = session_->heap();
  const bool in_heap = bytes >= HugePages::kLeastBytes && heap && heap->offset_of(data, bytes) != NodeHeap::kNowhere;
  if (!in_heap) pages_.note_use(data, bytes);
}

void NodeRounds::note_use(const Pieces& data, size_t element) {
  data.visit(0, data.count(), [&](std::byte* piece, size_t, size_t n) { note_use(piece, n * element); });
}

void NodeRounds::copy(const Pieces& from, const Slice& elements, std::byte* to, size_t element) {
  from.visit(elements.begin, elements.end,
             [&](std::byte* data, size_t at, size_t n) { write_.copy(to + at * element, data, n * element); });
}

}  // namespace ours
