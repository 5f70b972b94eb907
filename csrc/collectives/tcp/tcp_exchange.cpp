#include <algorithm>
#include <cstring>

#include "collectives/call_checks.h"
#include "collectives/tcp/tcp_group_impl.h"
#include "common/partition.h"

// What moves data unchanged between pairs of ranks: gather, scatter, all_to_all, and all_gather among few ranks. Every
// rank sends at once to all that it has something for, beginning with the next rank, so that not all send to the same
// one. Each message goes directly from its owner to its reader: no byte travels twice.
//
// How much a rank gets from another must be what that one sends, and if it is not, no rank may have written anything.
// So a rank first looks at the headers of all that come to it, leaving the data where it is, then all confirm by a
// dissemination that they found what they expected, and then the data is read. Where every rank sees every other's
// header, and all say that they send and expect one and the same size everywhere, there is nothing to confirm.
//
// Among many ranks, all_gather goes around a ring, as that of tcp_reduce_ring.cpp: the sizes that a rank expects are
// compared with its neighbour's, and then all confirm.

namespace ours {

namespace {

/// The sender sends and expects as much as this message is long, from and to all.
constexpr uint8_t kUniform = 1;
/// The round in which ranks say that they have begun, before those in which they confirm.
constexpr uint32_t kBegun = 0;
constexpr uint32_t kConfirming = 1;
/// The phase of the tables of sizes; those of blocks are small numbers.
constexpr uint16_t kSizes = UINT16_MAX;

void copy_own(ConstSpan from, Span to) {
  if (from.bytes != 0 && from.data != to.data) std::memcpy(to.data, from.data, from.bytes);
}

/// All ranks, this one included, have such a message, and all are of `bytes`.
template <class Spans>
bool all_of_size(const Spans& spans, size_t bytes) {
  return std::all_of(spans.begin(), spans.end(), [bytes](const auto& span) { return span && span->bytes == bytes; });
}

bool overlap(const ConstSpan& a, const Span& b) {
  const auto from = reinterpret_cast<uintptr_t>(a.data);
  const auto to = reinterpret_cast<uintptr_t>(b.data);
  return from < to + b.bytes && to < from + a.bytes;
}

}  // namespace

void TcpGroup::all_gather(const Call& call, ConstSpan input, const std::vector<Span>& outputs) {
  const auto ranks = static_cast<size_t>(size());
  check_one_a_rank(call, outputs.size(), ranks);
  check_own(call, rank(), input.bytes, outputs[static_cast<size_t>(rank())].bytes);
  if (choose(Selectable::AllGather, 0) == Algorithm::Ring)
    return guarded([&] { all_gather_ring(call, input, outputs); });
  Exchange plan;
  plan.sends.assign(ranks, input);
  plan.receives.assign(outputs.begin(), outputs.end());
  guarded([&] { exchange(call, record_of(call), plan); });
}

void TcpGroup::gather(const Call& call, ConstSpan input, const std::vector<Span>& outputs, int root) {
  check_root(root, size());
  const auto ranks = static_cast<size_t>(size());
  Exchange plan;
  plan.sends.resize(ranks);
  plan.receives.resize(ranks);
  plan.sends[static_cast<size_t>(root)] = input;
  if (rank() == root) {
    check_one_a_rank(call, outputs.size(), ranks);
    plan.receives.assign(outputs.begin(), outputs.end());
  }
  CallRecord record = record_of(call);
  record.root = root;
  exchange_checked(call, record, plan);
}

void TcpGroup::scatter(const Call& call, const std::vector<ConstSpan>& inputs, Span output, int root) {
  check_root(root, size());
  const auto ranks = static_cast<size_t>(size());
  Exchange plan;
  plan.sends.resize(ranks);
  plan.receives.resize(ranks);
  plan.receives[static_cast<size_t>(root)] = output;
  if (rank() == root) {
    check_one_a_rank(call, inputs.size(), ranks);
    plan.sends.assign(inputs.begin(), inputs.end());
  }
  CallRecord record = record_of(call);
  record.root = root;
  exchange_checked(call, record, plan);
}

void TcpGroup::all_to_all(const Call& call, const std::vector<ConstSpan>& inputs, const std::vector<Span>& outputs) {
  const auto ranks = static_cast<size_t>(size());
  check_one_a_rank(call, inputs.size(), ranks);
  check_one_a_rank(call, outputs.size(), ranks);
  Exchange plan;
  plan.sends.assign(inputs.begin(), inputs.end());
  plan.receives.assign(outputs.begin(), outputs.end());
  exchange_checked(call, record_of(call), plan);
}

void TcpGroup::exchange_checked(const Call& call, const CallRecord& record, const Exchange& plan) {
  const auto& gives = plan.sends[static_cast<size_t>(rank())];
  const auto& expects = plan.receives[static_cast<size_t>(rank())];
  if (gives && expects) check_own(call, rank(), gives->bytes, expects->bytes);
  guarded([&] { exchange(call, record, plan); });
}

void TcpGroup::exchange(const Call& call, const CallRecord& record, const Exchange& plan) {
  const auto ranks = static_cast<size_t>(size());
  const auto me = static_cast<size_t>(rank());
  const auto& own = plan.sends[me];
  std::vector<std::vector<std::byte>> copies;
  const bool uniform = own && all_of_size(plan.sends, own->bytes) && all_of_size(plan.receives, own->bytes);
  TcpCall tcp(*mesh_, facts_of(call, record));
  if (ranks > 1) tcp.agree(kBegun, static_cast<int>((me + 1) % ranks));
  size_t sent = 0, to_send = 0, received = 0, to_receive = 0;
  struct Source {
    int rank;
    Span span;
  };
  std::vector<Source> sources;
  for (size_t i = 1; i < ranks; ++i) {
    const size_t to = (me + i) % ranks;
    const size_t from = (me + ranks - i) % ranks;
    if (const auto& span = plan.receives[from]) sources.push_back({static_cast<int>(from), *span});
    if (const auto& span = plan.sends[to]) {
      const void* data = span->data;
      if (const auto& back = plan.receives[to]; back && overlap(*span, *back)) {
        // What comes from that rank goes where this lies, and may come before this has gone.
        copies.emplace_back(static_cast<const std::byte*>(data), static_cast<const std::byte*>(data) + span->bytes);
        data = copies.back().data();
      }
      tcp.send({static_cast<int>(to), 0, span->bytes, uniform ? kUniform : uint8_t{0}}, data, &sent);
      to_send += tcp.parts(span->bytes);
    }
  }

  bool begun = ranks == 1;
  std::vector<Source> unseen = sources;
  bool all_uniform = uniform;
  const auto look = [&](const Source& from) {
    const FrameHeader* header = tcp.next_from(from.rank);
    if (header == nullptr) return false;
    all_uniform = all_uniform && header->detail == kUniform;
    if (header->total == from.span.bytes) return true;
    tcp.mismatch(tcp.describe(from.rank) + " sends " + std::to_string(header->total) + " bytes to " +
                 tcp.describe(rank()) + ", which expects " + std::to_string(from.span.bytes) + ", in " +
                 describe_record(record) + ". Make the sizes of the tensors agree on all ranks");
  };
  tcp.run([&] {
    begun = begun || tcp.agreed(kBegun, static_cast<int>((me + ranks - 1) % ranks));
    unseen.erase(std::remove_if(unseen.begin(), unseen.end(), look), unseen.end());
    return begun && unseen.empty();
  });
  if (!all_uniform) {
    Dissemination confirmed(tcp, rank(), size(), kConfirming);
    tcp.run([&] { return confirmed.advance(); });
  }

  for (const Source& from : sources) {
    tcp.receive({from.rank, 0, from.span.bytes}, from.span.data, &received);
    to_receive += tcp.parts(from.span.bytes);
  }
  if (const auto& to = plan.receives[me]; own && to) copy_own(*own, *to);
  tcp.run([&] { return sent == to_send && received == to_receive; });
}

void TcpGroup::all_gather_ring(const Call& call, ConstSpan input, const std::vector<Span>& outputs) {
  const auto ranks = static_cast<size_t>(size());
  const auto me = static_cast<size_t>(rank());
  const CallRecord record = record_of(call);
  TcpCall tcp(*mesh_, facts_of(call, record));
  const int next = static_cast<int>((me + 1) % ranks);
  const int before = static_cast<int>((me + ranks - 1) % ranks);
  const size_t chunk = mesh_->plan().chunk_bytes;

  // If any two ranks expect other sizes, so do two neighbours.
  std::vector<uint64_t> sizes, theirs(ranks);
  for (const Span& output : outputs) sizes.push_back(output.bytes);
  if (ranks > 1) {
    const size_t bytes = ranks * sizeof(uint64_t);
    size_t told = 0, heard = 0;
    std::byte* const outgoing = tcp.keep(bytes);
    std::byte* const incoming = tcp.keep(bytes);
    std::memcpy(outgoing, sizes.data(), bytes);
    tcp.send({next, kSizes, bytes}, outgoing, &told);
    tcp.receive({before, kSizes, bytes}, incoming, &heard);
    tcp.run([&] { return told == tcp.parts(bytes) && heard == told; });
    std::memcpy(theirs.data(), incoming, bytes);
  } else {
    theirs = sizes;
  }
  const auto differs = std::mismatch(sizes.begin(), sizes.end(), theirs.begin());
  if (differs.first != sizes.end()) {
    tcp.mismatch(tcp.describe(rank()) + " expects " + std::to_string(*differs.first) + " bytes from " +
                 tcp.describe(static_cast<int>(differs.first - sizes.begin())) + ", " + tcp.describe(before) +
                 " expects " + std::to_string(*differs.second) + " bytes, in " + describe_record(record) +
                 ". Make the sizes of the tensors agree on all ranks");
  }
  Dissemination all(tcp, rank(), size());

  // In step t, rank r gets the block of rank r - 1 - t, and sends it on in the next.
  const size_t steps = ranks - 1;
  const auto block_of = [&](size_t step) { return (me + ranks - 1 - step) % ranks; };
  size_t sent = 0, to_send = 0;
  if (steps > 0) {
    tcp.send({next, 0, input.bytes}, input.data, &sent);
    to_send = tcp.parts(input.bytes);
  }
  tcp.run([&] { return all.advance(); });
  std::vector<std::vector<size_t>> arrived(steps);
  for (size_t step = 0; step < steps; ++step) {
    const Span block = outputs[block_of(step)];
    arrived[step].assign(tcp.parts(block.bytes), 0);
    for (size_t part = 0; part < arrived[step].size(); ++part) {
      tcp.receive_part({before, static_cast<uint16_t>(step), block.bytes}, part,
                       static_cast<std::byte*>(block.data) + part * chunk, &arrived[step][part]);
    }
  }
  size_t step = 0, part = 0;
  tcp.run([&] {
    while (step < steps && arrived[step][part] == 1) {
      const Span block = outputs[block_of(step)];
      if (step + 1 < steps) {
        tcp.send_part({next, static_cast<uint16_t>(step + 1), block.bytes}, part,
                      static_cast<std::byte*>(block.data) + part * chunk, &sent);
        ++to_send;
      }
      if (++part < arrived[step].size()) continue;
      ++step;
      part = 0;
    }
    return step == steps && sent == to_send;
  });
  copy_own(input, outputs[me]);
}

}  // namespace ours
