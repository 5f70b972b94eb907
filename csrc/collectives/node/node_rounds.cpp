#include "collectives/node/node_rounds.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "collectives/call_number.h"
#include "common/error.h"
#include "common/interval.h"
#include "transport/stop_notice.h"

namespace ours {

namespace {

bool is_later(const NodeArrival& a, const NodeArrival& b) {
  return b.rank < 0 || static_cast<int32_t>(a.called - b.called) > 0;  // signed, because the times wrap
}

/// Keeps the two that came last. Of two times of one rank the earlier holds.
void keep_last(NodeArrival (&last)[2], const NodeArrival& one) {
  if (one.rank < 0) return;
  for (NodeArrival& known : last) {
    if (known.rank != one.rank) continue;
    if (is_later(known, one)) known = one;
    if (is_later(last[1], last[0])) std::swap(last[0], last[1]);
    return;
  }
  if (is_later(one, last[0])) {
    last[1] = std::exchange(last[0], one);
  } else if (is_later(one, last[1])) {
    last[1] = one;
  }
}

void gather(Shown& all, const Shown& one) {
  all.differ = all.differ || one.differ || all.digest != one.digest;
  all.lend_next = all.lend_next || one.lend_next;
  all.stop = all.stop || one.stop;
  for (const NodeArrival& arrival : one.last) keep_last(all.last, arrival);
  all.exchanged.balance += one.exchanged.balance;
  all.exchanged.longest = std::max(all.exchanged.longest, one.exchanged.longest);
  all.exchanged.lenders += one.exchanged.lenders;
  all.exchanged.in_heap += one.exchanged.in_heap;
}

}  // namespace

NodeRounds::NodeRounds(std::shared_ptr<NodeSession> session, Setting write_around)
    : session_(std::move(session)),
      together_(session_->domains().together()),
      barrier_(*session_, gather),
      spread_(*session_),
      write_(*session_, write_around),
      places_(*session_, barrier_) {}

void NodeRounds::arrive(const Running& run, const Exchanged& exchanged, bool lend_next) {
  const auto called = static_cast<uint32_t>(steady_us(run.call.called));
  CallRecord& record = next_arrival().record;
  record = run.record;
  // Where the sizes of all parts must agree, and not only their sum, the record has no place for both.
  if (run.fingerprint != 0) record.count = run.fingerprint;
  const NodeArrival own{session_->number_of(rank()), called};
  const Shown shows{digest_of(record), {own, kNobody}, exchanged, false, lend_next, shows_stop(run)};
  spread_.publish(barrier_.next_parity());
  barrier_.arrive(&shows);
  begun_on_ = std::this_thread::get_id();
}

bool NodeRounds::open(const Running& run, const Exchanged& exchanged, bool lend_next) {
  if (!std::exchange(begun_, false)) {
    arrive(run, exchanged, lend_next);
  } else if (!all_have_begun()) {
    session_->failure().check();  // what all ranks have begun ends well on all of them, whatever has come after it
  }
  begun_ = run.call.part == Part::Beginning;
  if (begun_) return false;
  await(run);
  if (barrier_.shown().differ) throw_mismatch(run.record.seq);
  hear(run);
  // The thread that began has said where it runs.
  if (begun_on_ == std::this_thread::get_id()) spread_.settle(barrier_.parity());
  return true;
}

void NodeRounds::await(const Running& run) {
  barrier_.await(run.call.deadline, run.call.seq, [&run] { return describe_record(run.record); });
}

void NodeRounds::sync_and_pass_on(const Running& run) {
  Shown shows{};
  shows.stop = shows_stop(run);
  int last = -1;
  for (NodeArrival& arrival : shows.last) {
    if (run.call.arrivals != nullptr) last = run.call.arrivals->last(last);
    arrival = kNobody;
    if (last >= 0) arrival = {last, static_cast<uint32_t>(steady_us(run.call.called) + run.call.arrivals->at(last))};
  }
  barrier_.arrive(&shows);
  await(run);
  hear(run);
}

bool NodeRounds::shows_stop(const Running& run) { return run.call.stop != nullptr && run.call.stop->show(); }

void NodeRounds::hear(const Running& run) {
  const Shown& all = barrier_.shown();
  if (run.call.stop != nullptr) run.call.stop->hear(all.stop);
  if (run.call.arrivals == nullptr) return;
  const SinceCall since_call(run.call.called);
  for (const NodeArrival& arrival : all.last) {
    if (arrival.rank < 0 || arrival.rank == session_->number_of(rank())) continue;
    run.call.arrivals->note(arrival.rank, since_call(arrival.called));
  }
}

void NodeRounds::throw_mismatch(uint64_t call) {
  const auto record_of_rank = [&](int r) { return session_->block(r).arrival[barrier_.parity()].record; };
  // A rank that has refused a call goes on to the next one, while the others are still at this one.
  uint64_t first = call;
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

void NodeRounds::reserve_more(size_t bytes) {
  session_->memory()->reserve(session_->layout().stage(static_cast<size_t>(rank()), 0), bytes);
  reserved_ = bytes;
}

void NodeRounds::take_beginning() {
  const NodeLayout& layout = session_->layout();
  for (size_t parity = 0; parity < 2; ++parity) {
    session_->memory()->reserve(layout.stage(static_cast<size_t>(rank()), parity),
                                std::min(kBeginning, layout.chunk_bytes));
  }
  has_beginning_ = true;
}

void NodeRounds::note_use(const void* data, size_t bytes) {
  if (bytes < HugePages::kLeastBytes || session_->heap().offset_of(data, bytes) == NodeHeap::kNowhere)
    pages_.note_use(data, bytes);
}

void NodeRounds::note_use(const Pieces& data, size_t element) {
  data.visit(0, data.count(), [&](std::byte* piece, size_t, size_t n) { note_use(piece, n * element); });
}

void NodeRounds::copy(const Pieces& from, const Slice& elements, std::byte* to, size_t element) {
  from.visit(elements.begin, elements.end,
             [&](std::byte* data, size_t at, size_t n) { write_.copy(to + at * element, data, n * element); });
}

}  // namespace ours
