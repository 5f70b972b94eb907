#include <algorithm>
#include <cstring>

#include "collectives/node/node_algorithms.h"
#include "common/partition.h"

// All collectives that move data unchanged: each rank has bytes for some ranks, either the same for all of them (its
// stage is one window, read by many) or different ones (its stage is divided into a window for each destination). In
// round k the windows carry piece k; all ranks write, synchronise, and read. What a rank sends to itself is copied
// directly.
//
// The first round also publishes how many bytes each rank sends to each other rank and expects from it, and a balance
// of that. So every rank finds a disagreement of any two before a byte of a result is written, and only then compares
// all sizes. What all get of a rank lies beside the record of its call, if it is short enough.

namespace ours::node {

size_t check_published_sizes(const NodeRounds& rounds, const CallRecord& record) {
  if (rounds.exchanged().balance == 0) return rounds.exchanged().longest;
  std::vector<const uint64_t*> tables;
  tables.reserve(static_cast<size_t>(rounds.size()));
  for (int r = 0; r < rounds.size(); ++r) tables.push_back(rounds.sizes_of(r));
  return check_sizes(tables, [&](int r) { return rounds.session().describe(r); }, record);
}

namespace {

void note_use(NodeRounds& rounds, const ExchangePlan& plan, bool common) {
  for (const auto& span : plan.sends) {
    if (!span) continue;
    rounds.note_use(span->data, span->bytes);
    if (common) break;
  }
  const bool only_sends = plan.movement == Movement::Broadcast && plan.root == rounds.rank();  // its one buffer
  for (const auto& span : plan.receives) {
    if (span && !only_sends) rounds.note_use(span->data, span->bytes);
  }
}

/// The windows of a collective with a root whose ranks copy at the same time, one a piece ahead of the others. In
/// smaller ones, synchronising takes longer than what then overlaps.
constexpr size_t kAheadWindow = size_t{128} << 10;

/// The longest messages for which they do. Longer ones are read in the memory of their sender; very long ones in the
/// faster way (see LendChoice).
constexpr size_t kMostAhead = size_t{1} << 20;

/// From here on, messages go in the faster way. The first rank's time lacks the end of what others do, if it only
/// sends, and what they do meanwhile on its core, if they share it; of shorter messages that would be most.
constexpr size_t kLeastTimed = size_t{2} << 20;

/// kLeastTimed, or less where all ranks do as the first one, each on a core of its own.
size_t least_timed(const NodeRounds& rounds, const ExchangePlan& plan) {
  return plan.root < 0 && rounds.session().have_own_cores() ? LendChoice::kLeastMoved : kLeastTimed;
}

/// Whether the ranks that send run ahead of those that receive, which needs a core for each. Then two copies mostly
/// take less time than one by which the receiver reads in the sender's memory while that waits. Only if a rank sends
/// the same to all: a scatter's root would copy more than any other rank, and they would wait for it.
bool runs_ahead(const NodeRounds& rounds, const ExchangePlan& plan) {
  return plan.root >= 0 && plan.is_common() && rounds.session().have_own_cores();
}

/// Whether the plan of this rank is worth a beginning of its own.
bool can_begin(const ExchangePlan& plan, size_t me, size_t window) {
  size_t sum = 0;
  for (size_t r = 0; r < plan.sends.size(); ++r) sum += std::max(plan.sent(r), plan.received(r));
  return repays_no_thread(piece_count(plan.longest(me), window), sum);
}

}  // namespace

void exchange(NodeRounds& rounds, const Running& run, const ExchangePlan& plan) {
  const auto ranks = static_cast<size_t>(rounds.size());
  const auto me = static_cast<size_t>(rounds.rank());
  const bool common = plan.is_common();
  const size_t chunk = rounds.chunk_bytes();
  const bool ahead = runs_ahead(rounds, plan);
  size_t window = common ? chunk : chunk / ranks / kCacheLine * kCacheLine;
  if (ahead) window = std::min(window, kAheadWindow);
  const auto in_line = [common](size_t bytes) { return common && bytes <= NodeRounds::kLineBytes; };
  const auto fill = [&](size_t k) {
    for (size_t d = 0; d < ranks; ++d) {
      const Slice piece = piece_of(plan.sent(d), window, k);
      if (d == me || piece.empty()) continue;
      std::byte* const to = in_line(plan.sent(d)) ? rounds.next_line() : rounds.next_stage();
      const auto* from = static_cast<const std::byte*>(plan.sends[d]->data) + piece.begin;
      rounds.write().copy(common ? to : to + d * window, from, piece.size());
      if (common) return;  // one copy serves all
    }
  };
  const auto drain = [&](size_t k) {
    // Each begins with the next rank, so that they do not all read the same stage at once.
    for (size_t i = 1; i < ranks; ++i) {
      const size_t s = (me + i) % ranks;
      const Slice piece = piece_of(plan.received(s), window, k);
      if (piece.empty()) continue;
      const auto sender = static_cast<int>(s);
      const std::byte* const stage = in_line(plan.received(s)) ? rounds.line_of(sender) : rounds.stage_of(sender);
      const std::byte* const from = stage + (common ? 0 : me * window);
      std::memcpy(static_cast<std::byte*>(plan.receives[s]->data) + piece.begin, from, piece.size());
    }
  };

  if (run.call.part == Part::Beginning && !can_begin(plan, me, window)) return;
  static_assert(kShort < LendChoice::kLeastMoved, "what has a beginning is not timed");
  const size_t longest = plan.longest(me);
  // Of messages of many sizes, the ranks may have different longest ones, and so no common choice.
  const bool timed = longest >= least_timed(rounds, plan) && (plan.root >= 0 || plan.is_uniform(longest));
  LendTiming timing(rounds.exchanges(plan.movement), timed ? longest : 0, rounds.session());
  DirectExchange direct(rounds, plan);
  Exchanged own{};
  if (!rounds.has_begun()) {
    if (!in_line(longest)) rounds.reserve_beginning(common ? longest : chunk);
    note_use(rounds, plan, common);
    rounds.write().begin();
    plan.write_sizes(rounds.next_sizes());
    const bool is_to_lend = timed ? timing.lends() : !(ahead && longest <= kMostAhead);
    const bool lends = is_to_lend && direct.lend();
    if (!lends) fill(0);
    own = {plan.balance(me), longest, lends ? 1U : 0U, 0};
  }
  // Some ranks may find all of their messages equally long though this one does not: they are to do as it does.
  const bool lend_next = timed ? timing.arrive() : me == 0 && own.lenders != 0;
  if (!rounds.open(run, own, lend_next)) return;
  timing.go_on(rounds.lend_next());
  const size_t lenders = rounds.exchanged().lenders;
  const size_t count = std::max<size_t>(1, piece_count(check_published_sizes(rounds, run.record), window));
  if (lenders == ranks) {
    direct.run(run);
    return timing.end();
  }
  if (lenders > 0) {
    fill(0);
    rounds.sync(run);
  }
  plan.copy_own(me);
  for (size_t k = 0; k < count; ++k) {
    if (k > 0) rounds.sync(run);
    drain(k);
    if (k + 1 < count) fill(k + 1);
  }
  timing.end();  // where a rank only sends, the last round of many is not in it
}

}  // namespace ours::node
