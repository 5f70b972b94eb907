#include <algorithm>
#include <cstring>
#include <vector>

#include "collectives/hierarchical/hierarchical_algorithms.h"
#include "collectives/hierarchical/relays.h"
#include "collectives/node/node_algorithms.h"

// gather, scatter and all_to_all over several nodes. A rank gives what it has for the ranks of another node to one of
// them, its relay there (relays.h), which hands it on through shared memory. So a rank needs a connection to each other
// node and not to each other rank, and messages are as many times as long as a node has ranks. In small groups, long
// messages go directly from their owners to their readers, which costs a copy less.
//
// A relay first gets all sizes. It compares them with what the ranks of its node expect, which they have told it,
// before anything is read or written; then all ranks confirm that they found what was expected: the node's ranks to its
// leader, and the leaders to each other. What is handed on comes in rounds, from one rank of a node after the other:
// the ranks of the node exchange what they have got, while the next round's data arrives. Small messages of several
// sources share a round.

namespace ours::hierarchical {

namespace {

/// What arrives from a source, for all ranks of this node.
struct Arriving {
  int rank = -1;  ///< -1: in this round, another rank of the node has a source, and this one has none
  std::vector<uint64_t> sizes;
  size_t bytes() const {
    size_t sum = 0;
    for (const uint64_t size : sizes) sum += size;
    return sum;
  }
};

class Exchanging {
 public:
  Exchanging(HierarchicalRun& run, const ExchangePlan& plan)
      : run_(run), plan_(plan), relays_(run.map, plan), locals_(run.map.members().size()), sent_(relays_.steps() + 1) {}

  void go() {
    open();
    const std::vector<std::vector<uint64_t>> asked = ask();
    for (size_t step = 1; step <= relays_.steps(); ++step) send(step);
    compare(asked);
    run_.sync();
    run_.agree();
    receive_directly();
    hand_on();
    run_.wait([&] { return sent_until(relays_.steps()) && direct_.complete(); }, false);
  }

 private:
  /// From this length on, a message may go directly from its owner to its reader.
  static constexpr size_t kLong = size_t{32} << 10;

  /// Whether a message goes to its reader directly. Both ends decide alike, unless their sizes disagree, of which the
  /// relay hears in any case.
  bool is_direct(size_t bytes) const { return bytes >= kLong && relays_.most_peers() <= run_.most_peers; }
  size_t relayed(size_t bytes) const { return is_direct(bytes) ? 0 : bytes; }

  /// Whether the messages of a rank for a node travel together, for which they are copied.
  static bool is_packed(size_t bytes, size_t messages) { return bytes <= messages * kLong; }

  TcpCall::Message message(int peer, size_t number, size_t bytes) const {
    return {peer, static_cast<uint16_t>(number), bytes, 0, static_cast<uint32_t>(number)};
  }

  void open() {
    for (const int r : run_.map.members()) {
      inside_.sends.push_back(plan_.sends[static_cast<size_t>(r)]);
      inside_.receives.push_back(plan_.receives[static_cast<size_t>(r)]);
    }
    run_.in_node([&] {
      inside_.write_sizes(run_.rounds.next_sizes());
      run_.rounds.open(run_.running,
                       {inside_.balance(static_cast<size_t>(run_.rounds.rank())), longest_relayed(), 0, 0});
      longest_ = run_.rounds.exchanged().longest;
      node::check_published_sizes(run_.rounds, run_.running.record);
    });
  }

  size_t longest_relayed() const {
    size_t longest = 0;
    for (size_t r = 0; r < plan_.sends.size(); ++r) {
      if (run_.map.node_of(static_cast<int>(r)) == run_.map.here()) continue;
      longest = std::max({longest, relayed(plan_.sent(r)), relayed(plan_.received(r))});
    }
    return longest;
  }

  /// Tells the node's relays what this rank expects; returns what each rank of the node expects from the sources of
  /// this one, in their order.
  std::vector<std::vector<uint64_t>> ask() {
    std::vector<std::vector<uint64_t>> mine(locals_), theirs(locals_);
    ExchangePlan sizes{Movement::AllToAll, -1, {}, {}};
    const size_t own = relays_.sources(static_cast<size_t>(run_.map.local())).size();
    for (size_t local = 0; local < locals_; ++local) {
      for (const int source : relays_.sources(local)) {
        mine[local].push_back(source < 0 ? 0 : plan_.received(static_cast<size_t>(source)));
      }
      theirs[local].resize(own);
      sizes.sends.emplace_back(ConstSpan{mine[local].data(), own * sizeof(uint64_t)});
      sizes.receives.emplace_back(Span{theirs[local].data(), own * sizeof(uint64_t)});
    }
    if (own == 0) return theirs;
    run_.in_node([&] { run_.node.exchange(run_.running.call, sizes); });
    return theirs;
  }

  /// Sends this rank's messages for the ranks of a node: the sizes, those that go directly, and those for the relay.
  void send(size_t step) {
    if (!relays_.sends(step)) return;
    const std::vector<int>& readers = run_.map.ranks_of(relays_.to(step));
    const int relay = relays_.relay_on(relays_.to(step));
    Tally& sent = sent_[step];
    auto* const sizes = reinterpret_cast<uint64_t*>(run_.tcp.keep(readers.size() * sizeof(uint64_t)));
    size_t bytes = 0;
    for (size_t k = 0; k < readers.size(); ++k) {
      sizes[k] = plan_.sent(static_cast<size_t>(readers[k]));
      bytes += relayed(sizes[k]);
    }
    run_.tcp.send(message(relay, 0, readers.size() * sizeof(uint64_t)), sizes, sent);
    for (size_t k = 0; k < readers.size(); ++k) {
      if (!is_direct(sizes[k])) continue;
      run_.tcp.send(message(readers[k], 1, sizes[k]), unchanging(readers[k]), direct_);
    }
    if (bytes == 0) return;
    const bool packed = is_packed(bytes, readers.size());
    std::byte* const pack = packed ? run_.tcp.keep(bytes) : nullptr;
    std::byte* end = pack;
    for (size_t k = 0; k < readers.size(); ++k) {
      if (relayed(sizes[k]) == 0) continue;
      if (packed) {
        end = copy(end, plan_.sends[static_cast<size_t>(readers[k])]->data, sizes[k]);
      } else {
        run_.tcp.send(message(relay, 2 + k, sizes[k]), unchanging(readers[k]), sent);
      }
    }
    if (packed) run_.tcp.send(message(relay, 2, bytes), pack, sent);
  }

  /// What this rank sends to another, or a copy of it.
  const void* unchanging(int to) {
    const ConstSpan& span = *plan_.sends[static_cast<size_t>(to)];
    if (!plan_.overlaps(static_cast<size_t>(to))) return span.data;
    // What comes from that rank goes to the same memory, and may arrive before this has been sent.
    std::byte* const kept = run_.tcp.keep(span.bytes);
    copy(kept, span.data, span.bytes);
    return kept;
  }

  /// A rank sends these before what it sends to its relay, which may be the same one.
  void receive_directly() {
    for (size_t step = 1; step <= relays_.steps(); ++step) {
      for (const int from : run_.map.ranks_of(relays_.from(step))) {
        const size_t bytes = plan_.received(static_cast<size_t>(from));
        if (!is_direct(bytes)) continue;
        run_.tcp.receive(message(from, 1, bytes), plan_.receives[static_cast<size_t>(from)]->data, direct_);
      }
    }
  }

  bool sent_until(size_t step) const {
    return std::all_of(sent_.begin(), sent_.begin() + static_cast<std::ptrdiff_t>(step) + 1,
                       [](const Tally& sent) { return sent.complete(); });
  }

  /// Gets the sizes of what this rank will hand on. All nodes have made the same call if they have come.
  void compare(const std::vector<std::vector<uint64_t>>& asked) {
    const std::vector<int>& sources = relays_.sources(static_cast<size_t>(run_.map.local()));
    Tally announced;
    const size_t bytes = locals_ * sizeof(uint64_t);
    std::byte* const tables = run_.tcp.keep(sources.size() * bytes);
    for (size_t s = 0; s < sources.size(); ++s) {
      if (sources[s] >= 0) run_.tcp.receive(message(sources[s], 0, bytes), tables + s * bytes, announced);
    }
    run_.wait([&] { return announced.complete(); });
    for (size_t s = 0; s < sources.size(); ++s) {
      Arriving& from = arriving_.emplace_back();
      from.rank = sources[s];
      from.sizes.resize(locals_);
      if (from.rank >= 0) std::memcpy(from.sizes.data(), tables + s * bytes, bytes);
      for (size_t reader = 0; reader < locals_; ++reader) {
        if (from.sizes[reader] == asked[reader][s]) continue;
        run_.tcp.mismatch(sizes_disagree(run_.tcp.describe(from.rank), from.sizes[reader],
                                         run_.tcp.describe(run_.map.members()[reader]), asked[reader][s],
                                         run_.running.record));
      }
      for (uint64_t& size : from.sizes) size = relayed(size);
    }
  }

  /// How many sources of each rank of the node share a round. The same on all of them.
  size_t sources_a_round() const { return std::max<size_t>(1, run_.batch_bytes() / (locals_ * longest_)); }

  void hand_on() {
    run_.push();
    run_.in_node([&] { run_.node.exchange(run_.running.call, inside_); });
    if (longest_ == 0) return;
    const size_t together = sources_a_round();
    const size_t rounds = piece_count(arriving_.size(), together);
    size_t most = 0;
    const auto in_round = [&](size_t round) { return piece_of(arriving_.size(), together, round); };
    for (size_t round = 0; round < rounds; ++round) most = std::max(most, bytes_of(in_round(round)));
    // What has come, in two places used in turn: one is read while the next round's data arrives in the other.
    std::byte* const places[2] = {run_.tcp.keep(most), run_.tcp.keep(rounds > 1 ? most : 0)};
    std::vector<Tally> arrived(rounds);
    const auto receive = [&](size_t round) {
      std::byte* to = places[round % 2];
      for (size_t s = in_round(round).begin; s < in_round(round).end; ++s) to = take(arriving_[s], to, arrived[round]);
    };
    if (rounds > 0) receive(0);
    for (size_t round = 0; round < rounds; ++round) {
      // Nobody waits in the node with something left that another node needs for a round as early as this.
      const size_t step = relays_.step_of(in_round(round).end - 1);
      run_.wait([&] { return arrived[round].complete() && sent_until(step); });
      if (round + 1 < rounds) receive(round + 1);
      run_.push();
      share(in_round(round), places[round % 2]);
    }
  }

  size_t bytes_of(const Slice& sources) const {
    size_t sum = 0;
    for (size_t s = sources.begin; s < sources.end; ++s) sum += arriving_[s].bytes();
    return sum;
  }

  /// Receives what comes from a source; returns where that ends.
  std::byte* take(const Arriving& from, std::byte* to, Tally& arrived) {
    const size_t bytes = from.bytes();
    if (bytes == 0) return to;
    if (is_packed(bytes, locals_)) {
      run_.tcp.receive(message(from.rank, 2, bytes), to, arrived);
      return to + bytes;
    }
    for (size_t k = 0; k < locals_; ++k) {
      if (from.sizes[k] != 0) run_.tcp.receive(message(from.rank, 2 + k, from.sizes[k]), to, arrived);
      to += from.sizes[k];
    }
    return to;
  }

  /// The ranks of the node give one another what they have got from some of their sources.
  void share(const Slice& sources, const std::byte* arrived) {
    // By reader, what all these sources have for it.
    std::vector<std::vector<ConstSpan>> give(locals_);
    for (size_t s = sources.begin; s < sources.end; ++s) {
      for (size_t k = 0; k < locals_; ++k) {
        give[k].push_back({arrived, arriving_[s].sizes[k]});
        arrived += arriving_[s].sizes[k];
      }
    }
    // By relay, where what its sources have for this rank belongs.
    std::vector<std::vector<Span>> get(locals_);
    for (size_t k = 0; k < locals_; ++k) {
      const std::vector<int>& theirs = relays_.sources(k);
      for (size_t s = sources.begin; s < sources.end; ++s) {
        const bool comes = theirs[s] >= 0 && relayed(plan_.received(static_cast<size_t>(theirs[s]))) != 0;
        get[k].push_back(comes ? *plan_.receives[static_cast<size_t>(theirs[s])] : Span{});
      }
    }
    const auto sum = [](const auto& spans) {
      size_t bytes = 0;
      for (const auto& span : spans) bytes += span.bytes;
      return bytes;
    };
    size_t given = 0, got = 0;
    for (size_t k = 0; k < locals_; ++k) {
      given += sum(give[k]);
      got += sum(get[k]);
    }
    ExchangePlan round{Movement::AllToAll, -1, {}, {}};
    if (sources.size() == 1) {
      for (size_t k = 0; k < locals_; ++k) {
        round.sends.emplace_back(give[k][0]);
        round.receives.emplace_back(get[k][0]);
      }
      return exchange_in_node(round);
    }
    std::byte* const memory = run_.scratch.take(given + got);
    std::byte* to = memory;
    for (const auto& spans : give) {
      round.sends.emplace_back(ConstSpan{to, sum(spans)});
      for (const ConstSpan& span : spans) to = copy(to, span.data, span.bytes);
    }
    for (const auto& spans : get) {
      round.receives.emplace_back(Span{to, sum(spans)});
      to += sum(spans);
    }
    exchange_in_node(round);
    const std::byte* from = memory + given;
    for (const auto& spans : get) {
      for (const Span& span : spans) {
        copy(static_cast<std::byte*>(span.data), from, span.bytes);
        from += span.bytes;
      }
    }
  }

  static std::byte* copy(std::byte* to, const void* from, size_t bytes) {
    if (bytes != 0) std::memcpy(to, from, bytes);
    return to + bytes;
  }

  void exchange_in_node(const ExchangePlan& plan) {
    run_.in_node([&] { run_.node.exchange(run_.running.call, plan); });
  }

  HierarchicalRun& run_;
  const ExchangePlan& plan_;
  const Relays relays_;
  const size_t locals_;
  ExchangePlan inside_{Movement::AllToAll, -1, {}, {}};
  size_t longest_ = 0;       ///< bytes of the longest message that a rank of this node sends or gets
  std::vector<Tally> sent_;  ///< by step
  Tally direct_;
  std::vector<Arriving> arriving_;
};

}  // namespace

void exchange(HierarchicalRun& run, const ExchangePlan& plan) { Exchanging(run, plan).go(); }

}  // namespace ours::hierarchical
