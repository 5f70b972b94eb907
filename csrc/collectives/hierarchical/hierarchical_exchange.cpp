#include <algorithm>
#include <cstring>

#include "collectives/hierarchical/hierarchical_algorithms.h"
#include "collectives/node/node_algorithms.h"

// gather, scatter and all_to_all over several nodes: every message goes directly from its owner to its reader, within
// a node through shared memory. Before any is read, all are compared with what their readers expect: within the node
// by tables, between nodes by the headers of what has come in, whose data is not read until then. Then all ranks
// confirm that they found what they expected: the node's ranks to its leader, and the leaders to each other.

namespace ours::hierarchical {

void exchange(HierarchicalRun& run, const ExchangePlan& plan) {
  struct Source {
    int rank;
    Span span;
  };
  std::vector<Source> sources;
  ExchangePlan inside{Movement::AllToAll, -1, {}, {}};
  for (const int r : run.map.members()) {
    inside.sends.push_back(plan.sends[static_cast<size_t>(r)]);
    inside.receives.push_back(plan.receives[static_cast<size_t>(r)]);
  }
  run.in_node([&] {
    inside.write_sizes(run.rounds.next_sizes());
    const auto me = static_cast<size_t>(run.rounds.rank());
    run.rounds.open(run.running, {inside.balance(me), inside.longest(me), 0});
    node::check_published_sizes(run.rounds, run.running.record);
  });

  Tally sent, received;
  for (int i = 1; i < run.map.size(); ++i) {
    const int to = (run.map.rank() + i) % run.map.size();
    const int from = (run.map.rank() - i + run.map.size()) % run.map.size();
    const auto& comes = plan.receives[static_cast<size_t>(from)];
    if (comes && run.map.node_of(from) != run.map.here()) sources.push_back({from, *comes});
    const auto& span = plan.sends[static_cast<size_t>(to)];
    if (!span || run.map.node_of(to) == run.map.here()) continue;
    const void* data = span->data;
    if (plan.overlaps(static_cast<size_t>(to))) {
      // What comes from that rank goes to the same memory, and may arrive before this has been sent.
      std::byte* const copy = run.tcp.keep(span->bytes);
      std::memcpy(copy, data, span->bytes);
      data = copy;
    }
    run.tcp.send({to, 0, span->bytes}, data, sent);
  }

  std::vector<Source> unseen = sources;
  for (const Source& from : unseen) run.tcp.expect(from.rank, true);
  const auto look = [&](const Source& from) {
    const FrameHeader* header = run.tcp.next_from(from.rank);
    if (header == nullptr) return false;
    run.tcp.expect(from.rank, false);
    if (header->total == from.span.bytes) return true;
    run.tcp.mismatch(sizes_disagree(run.tcp.describe(from.rank), header->total, run.tcp.describe(run.map.rank()),
                                    from.span.bytes, run.running.record));
  };
  run.wait([&] {
    unseen.erase(std::remove_if(unseen.begin(), unseen.end(), look), unseen.end());
    return unseen.empty();
  });
  run.sync();
  run.agree();

  for (const Source& from : sources) {
    run.tcp.receive({from.rank, 0, from.span.bytes}, from.span.data, received);
  }
  run.push();
  run.in_node([&] { run.node.exchange(run.running.call, inside); });
  run.wait([&] { return sent.complete() && received.complete(); }, false);
}

}  // namespace ours::hierarchical
