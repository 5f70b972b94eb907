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

namespace {

Span nothing() { return Span{}; }

ConstSpan as_const(Span span) { return ConstSpan{span.data, span.bytes}; }

}  // namespace

void NodeGroup::broadcast(const Call& call, Span buffer, int root) {
  check_root(root, size());
  Exchange plan;
  const auto ranks = static_cast<size_t>(size());
  if (rank() == root) {
    plan.sends.assign(ranks, as_const(buffer));
    plan.sends[static_cast<size_t>(root)] = ConstSpan{};
  } else {
    plan.receives.assign(ranks, nothing());
    plan.receives[static_cast<size_t>(root)] = buffer;
  }
  CallRecord record = record_of(call);
  record.root = root;
  record.count = buffer.bytes / size_of(call.dtype);
  guarded([&] { exchange(call, record, plan); });
}

void NodeGroup::all_gather(const Call& call, ConstSpan input, const std::vector<Span>& outputs) {
  Exchange plan;
  plan.sends.assign(static_cast<size_t>(size()), input);
  plan.receives = outputs;
  guarded([&] { exchange(call, record_of(call), plan); });
}

void NodeGroup::gather(const Call& call, ConstSpan input, const std::vector<Span>& outputs, int root) {
  check_root(root, size());
  Exchange plan;
  plan.sends.assign(static_cast<size_t>(size()), ConstSpan{});
  plan.sends[static_cast<size_t>(root)] = input;
  if (rank() == root) plan.receives = outputs;
  CallRecord record = record_of(call);
  record.root = root;
  guarded([&] { exchange(call, record, plan); });
}

void NodeGroup::scatter(const Call& call, const std::vector<ConstSpan>& inputs, Span output, int root) {
  check_root(root, size());
  Exchange plan;
  plan.common = false;
  if (rank() == root) plan.sends = inputs;
  plan.receives.assign(static_cast<size_t>(size()), nothing());
  plan.receives[static_cast<size_t>(root)] = output;
  CallRecord record = record_of(call);
  record.root = root;
  guarded([&] { exchange(call, record, plan); });
}

void NodeGroup::all_to_all(const Call& call, const std::vector<ConstSpan>& inputs, const std::vector<Span>& outputs) {
  Exchange plan;
  plan.common = false;
  plan.sends = inputs;
  plan.receives = outputs;
  guarded([&] { exchange(call, record_of(call), plan); });
}

void NodeGroup::exchange(const Call& call, const CallRecord& record, const Exchange& plan) {
  const auto ranks = static_cast<size_t>(size());
  const auto me = static_cast<size_t>(rank());
  for (size_t n : {plan.sends.size(), plan.receives.size()}) {
    if (n != 0) check_one_a_rank(call, n, ranks);
  }
  if (!plan.sends.empty() && !plan.receives.empty()) {
    check_own(call, rank(), plan.sends[me].bytes, plan.receives[me].bytes);
  }
  reserve_stage();
  write_.begin();
  for (const ConstSpan& span : plan.sends) {
    saw_buffer(span.data, span.bytes);
    if (plan.common) break;
  }
  for (const Span& span : plan.receives) saw_buffer(span.data, span.bytes);

  const size_t chunk = session_->layout().chunk_bytes;
  const size_t window = plan.common ? chunk : chunk / ranks / kCacheLine * kCacheLine;
  const auto fill = [&](size_t k) {
    std::byte* to = stage(rank(), barrier_.next_parity());
    for (size_t d = 0; d < plan.sends.size(); ++d) {
      const Slice piece = piece_of(plan.sends[d].bytes, window, k);
      if (d == me || piece.empty()) continue;
      const auto* from = static_cast<const std::byte*>(plan.sends[d].data) + piece.begin;
      write_.copy(plan.common ? to : to + d * window, from, piece.size());
      if (plan.common) return;  // one copy serves all
    }
  };
  const auto drain = [&](size_t k) {
    // Begin with the next rank: not all of them read the same stage at the same time.
    for (size_t i = 1; i < plan.receives.size(); ++i) {
      const size_t s = (me + i) % ranks;
      const Slice piece = piece_of(plan.receives[s].bytes, window, k);
      if (piece.empty()) continue;
      const std::byte* from = stage(static_cast<int>(s), barrier_.parity());
      std::memcpy(static_cast<std::byte*>(plan.receives[s].data) + piece.begin, plan.common ? from : from + me * window,
                  piece.size());
    }
  };

  fill(0);
  publish_tables(plan);
  publish_record(record);
  sync(call, record);
  check_records(record);
  const size_t rounds = std::max<size_t>(1, piece_count(check_tables(record), window));
  if (!plan.sends.empty() && !plan.receives.empty() && plan.sends[me].data != plan.receives[me].data &&
      plan.sends[me].bytes != 0) {
    std::memcpy(plan.receives[me].data, plan.sends[me].data, plan.sends[me].bytes);
  }
  for (size_t k = 0; k < rounds; ++k) {
    if (k > 0) sync(call, record);
    drain(k);
    if (k + 1 < rounds) fill(k + 1);
  }
}

void NodeGroup::publish_tables(const Exchange& plan) {
  const auto ranks = static_cast<size_t>(size());
  auto* table = session_->at<uint64_t>(session_->layout().table(static_cast<size_t>(rank()), barrier_.next_parity()));
  for (size_t r = 0; r < ranks; ++r) {
    table[r] = plan.sends.empty() ? 0 : plan.sends[r].bytes;
    table[ranks + r] = plan.receives.empty() ? 0 : plan.receives[r].bytes;
  }
}

size_t NodeGroup::check_tables(const CallRecord& record) {
  const auto ranks = static_cast<size_t>(size());
  const auto table = [&](size_t r) {
    return session_->at<const uint64_t>(session_->layout().table(r, barrier_.parity()));
  };
  size_t most = 0;
  for (size_t from = 0; from < ranks; ++from) {
    for (size_t to = 0; to < ranks; ++to) {
      if (from == to) continue;
      const uint64_t sent = table(from)[to];
      const uint64_t expected = table(to)[ranks + from];
      if (sent != expected) {
        throw MismatchError(session_->describe(static_cast<int>(from)) + " sends " + std::to_string(sent) +
                            " bytes to " + session_->describe(static_cast<int>(to)) + ", which expects " +
                            std::to_string(expected) + ", in " + describe_record(record) +
                            ". Make the sizes of the tensors agree on all ranks");
      }
      most = std::max<size_t>(most, sent);
    }
  }
  return most;
}

}  // namespace ours
