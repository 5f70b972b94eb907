#include <algorithm>
#include <cstring>

#include "collectives/node/node_group_impl.h"
#include "common/partition.h"

// Everything that moves data unchanged: broadcast, all_gather, gather, scatter, all_to_all. All are one exchange: each
// rank has bytes for some ranks, either the same for all of them (its stage is one window, read by many) or different
// ones (its stage is divided into a window for each destination). In round k the windows carry piece k; all write,
// synchronise, and read. What a rank sends to itself is copied directly.
//
// The first round also publishes two tables a rank: how many bytes it sends to, and expects from, each rank. All ranks
// compare all of them, so that a disagreement of any two is found by everyone before a byte of a result is written.

namespace ours {

void NodeGroup::do_exchange(const Running& run, const ExchangePlan& plan) {
  const auto ranks = static_cast<size_t>(size());
  const auto me = static_cast<size_t>(rank());
  reserve_stage();
  write_.begin();
  for (const auto& span : plan.sends) {
    if (!span) continue;
    saw_buffer(span->data, span->bytes);
    if (plan.is_common()) break;
  }
  for (const auto& span : plan.receives) {
    if (span) saw_buffer(span->data, span->bytes);
  }

  const size_t chunk = session_->layout().chunk_bytes;
  const size_t window = plan.is_common() ? chunk : chunk / ranks / kCacheLine * kCacheLine;
  const auto fill = [&](size_t k) {
    std::byte* to = stage(rank(), barrier_.next_parity());
    for (size_t d = 0; d < ranks; ++d) {
      const Slice piece = piece_of(plan.sent(d), window, k);
      if (d == me || piece.empty()) continue;
      const auto* from = static_cast<const std::byte*>(plan.sends[d]->data) + piece.begin;
      write_.copy(plan.is_common() ? to : to + d * window, from, piece.size());
      if (plan.is_common()) return;  // one copy serves all
    }
  };
  const auto drain = [&](size_t k) {
    // Begin with the next rank: not all of them read the same stage at the same time.
    for (size_t i = 1; i < ranks; ++i) {
      const size_t s = (me + i) % ranks;
      const Slice piece = piece_of(plan.received(s), window, k);
      if (piece.empty()) continue;
      const std::byte* from = stage(static_cast<int>(s), barrier_.parity());
      std::memcpy(static_cast<std::byte*>(plan.receives[s]->data) + piece.begin,
                  plan.is_common() ? from : from + me * window, piece.size());
    }
  };

  fill(0);
  publish_sizes(plan);
  publish_record(run.record);
  sync(run.call, run.record);
  check_records(run.record);
  const size_t rounds = std::max<size_t>(1, piece_count(check_published_sizes(run.record), window));
  plan.copy_own(me);
  for (size_t k = 0; k < rounds; ++k) {
    if (k > 0) sync(run.call, run.record);
    drain(k);
    if (k + 1 < rounds) fill(k + 1);
  }
}

void NodeGroup::publish_sizes(const ExchangePlan& plan) {
  plan.write_sizes(
      session_->at<uint64_t>(session_->layout().table(static_cast<size_t>(rank()), barrier_.next_parity())));
}

size_t NodeGroup::check_published_sizes(const CallRecord& record) {
  std::vector<const uint64_t*> tables;
  for (int r = 0; r < size(); ++r) {
    tables.push_back(session_->at<const uint64_t>(session_->layout().table(static_cast<size_t>(r), barrier_.parity())));
  }
  return check_sizes(tables, [&](int r) { return session_->describe(r); }, record);
}

}  // namespace ours
