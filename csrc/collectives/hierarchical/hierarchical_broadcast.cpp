#include <algorithm>
#include <vector>

#include "collectives/broadcast_links.h"
#include "collectives/hierarchical/hierarchical_algorithms.h"
#include "common/partition.h"

// broadcast over several nodes: on each node, one rank gets the message over the network, once, passes it on to
// other nodes (see broadcast_links.h), and shares it with its own node batch by batch, while the next batch arrives.

namespace ours::hierarchical {

void broadcast(HierarchicalRun& run, const ExchangePlan& plan) {
  const Span buffer = plan.buffer();
  const int root = plan.root;
  run.open();
  run.agree();
  const int first = run.map.node_of(root);
  const auto holder_on = [&](int node) { return node == first ? root : run.map.leaders()[static_cast<size_t>(node)]; };
  const int holder = run.map.local_rank_of(holder_on(run.map.here()));
  const size_t parts = run.tcp.parts(buffer.bytes);
  const size_t chunk = run.plan.chunk_bytes;
  auto* const data = static_cast<std::byte*>(buffer.data);

  BroadcastLinks links;
  std::vector<Tally> arrived(parts);
  Tally sent;
  size_t passed_on = 0;
  const auto rank_at = [&](int place) { return holder_on((place + first) % run.map.nodes()); };
  const auto pass_on = [&](size_t end) {
    for (; passed_on < end && arrived[passed_on].complete(); ++passed_on) {
      for (const int child : links.children) {
        run.tcp.send_part({rank_at(child), 0, buffer.bytes}, passed_on, data + passed_on * chunk, sent);
      }
    }
  };
  if (run.map.local() == holder) {
    const int nodes = run.map.nodes();
    links = broadcast_links((run.map.here() - first + nodes) % nodes, nodes, parts);
    for (size_t part = 0; links.parent >= 0 && part < parts; ++part) {
      run.tcp.receive_part({rank_at(links.parent), 0, buffer.bytes}, part, data + part * chunk, arrived[part]);
    }
    pass_on(links.parent < 0 ? parts : 0);
    run.push();
  }
  const size_t batch = run.batch_bytes() / chunk;
  for (size_t begin = 0; begin < parts; begin += batch) {
    const size_t end = std::min(begin + batch, parts);
    if (run.map.local() == holder) {
      run.wait([&] {
        pass_on(parts);
        return passed_on >= end;
      });
    }
    if (run.rounds.size() == 1) continue;
    const size_t from = begin * chunk;
    const Span some{data + from, std::min(end * chunk, buffer.bytes) - from};
    run.in_node([&] { run.node.broadcast(run.running.call, some, holder); });
  }
  run.wait([&] { return sent.complete(); }, false);
}

}  // namespace ours::hierarchical
