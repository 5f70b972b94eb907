#include <algorithm>
#include <vector>

#include "collectives/hierarchical/hierarchical_algorithms.h"
#include "common/partition.h"

// broadcast over several nodes: on each node, one rank gets the message over the network, once, passes it on to
// another node, and shares it with its own node batch by batch, while the next batch arrives. The nodes form a chain
// that begins with the root's, or a binomial tree if the message has fewer parts than the chain has links, as in
// tcp_broadcast.cpp.

namespace ours::hierarchical {

namespace {

/// A node's neighbours in the chain or tree; `place` counts from the root's node.
struct Links {
  int parent = -1;  ///< places
  std::vector<int> children;
};

Links links_of(int place, int nodes, bool chain) {
  Links links;
  if (chain) {
    if (place > 0) links.parent = place - 1;
    if (place + 1 < nodes) links.children.push_back(place + 1);
    return links;
  }
  int bit = 1;
  for (; bit <= place; bit *= 2) links.parent = place - bit;
  for (; place + bit < nodes; bit *= 2) links.children.push_back(place + bit);
  return links;
}

}  // namespace

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

  Links links;
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
    links = links_of((run.map.here() - first + run.map.nodes()) % run.map.nodes(), run.map.nodes(),
                     parts >= static_cast<size_t>(run.map.nodes()));
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
