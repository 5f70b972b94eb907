#include <algorithm>
#include <cstring>

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

}  // namespace

void TcpGroup::do_exchange(const Running& run, const ExchangePlan& plan) {
  if (plan.movement == Movement::Broadcast) return broadcast_plan(run, plan);
  const bool ring = plan.movement == Movement::AllGather && choose(Selectable::AllGather, 0) == Algorithm::Ring;
  ring ? all_gather_ring(run, plan) : exchange_directly(run, plan);
}

void TcpGroup::exchange_directly(const Running& run, const ExchangePlan& plan) {
  const auto ranks = static_cast<size_t>(size());
  const auto me = static_cast<size_t>(rank());
  const auto& own = plan.sends[me];
  std::vector<std::vector<std::byte>> copies;
  const bool uniform = own && plan.is_uniform(own->bytes);
  TcpCall tcp(*mesh_, facts_of(*mesh_, run));
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
      if (plan.overlaps(to)) {
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
    const SizesDiffer differ{tcp.describe(from.rank), tcp.describe(rank()), header->total, from.span.bytes};
    tcp.mismatch(differ.in(run.record));
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
  plan.copy_own(me);
  tcp.run([&] { return sent == to_send && received == to_receive; });
}

void TcpGroup::all_gather_ring(const Running& run, const ExchangePlan& plan) {
  const auto ranks = static_cast<size_t>(size());
  const auto me = static_cast<size_t>(rank());
  TcpCall tcp(*mesh_, facts_of(*mesh_, run));
  const int next = static_cast<int>((me + 1) % ranks);
  const int before = static_cast<int>((me + ranks - 1) % ranks);
  const size_t chunk = mesh_->plan().chunk_bytes;

  // If any two ranks expect other sizes, so do two neighbours.
  std::vector<uint64_t> sizes, theirs(ranks);
  for (size_t r = 0; r < ranks; ++r) sizes.push_back(plan.received(r));
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
                 " expects " + std::to_string(*differs.second) + " bytes, in " + describe_record(run.record) +
                 ". Make the sizes of the tensors agree on all ranks");
  }
  Dissemination all(tcp, rank(), size());

  // In step t, rank r gets the block of rank r - 1 - t, and sends it on in the next.
  const size_t steps = ranks - 1;
  const auto block_of = [&](size_t step) { return (me + ranks - 1 - step) % ranks; };
  size_t sent = 0, to_send = 0;
  if (steps > 0) {
    tcp.send({next, 0, plan.sent(me)}, plan.sends[me]->data, &sent);
    to_send = tcp.parts(plan.sent(me));
  }
  tcp.run([&] { return all.advance(); });
  std::vector<std::vector<size_t>> arrived(steps);
  for (size_t step = 0; step < steps; ++step) {
    const Span block = *plan.receives[block_of(step)];
    arrived[step].assign(tcp.parts(block.bytes), 0);
    for (size_t part = 0; part < arrived[step].size(); ++part) {
      tcp.receive_part({before, static_cast<uint16_t>(step), block.bytes}, part,
                       static_cast<std::byte*>(block.data) + part * chunk, &arrived[step][part]);
    }
  }
  size_t step = 0, part = 0;
  tcp.run([&] {
    while (step < steps && arrived[step][part] == 1) {
      const Span block = *plan.receives[block_of(step)];
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
  plan.copy_own(me);
}

}  // namespace ours
