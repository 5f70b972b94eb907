#include "fuzz/parser.h"
#include "transport/topology.h"

// Which ranks share a node, as rank 0 publishes it in the store. The first byte is the number of ranks.

namespace ours::fuzz {
namespace {

Bytes input_of(const std::vector<int>& leaders) {
  return Bytes(1, static_cast<char>(leaders.size())) + Topology::of(leaders).text();
}

std::vector<Seed> seeds() {
  return {{"one_node", input_of({0, 0, 0, 0})},
          {"many_nodes", input_of({0, 1, 2, 3})},
          {"mixed", input_of({0, 1, 0, 1, 1, 5})}};
}

void parse(const Bytes& input) {
  Source source(input);
  const int size = source.byte();
  const Bytes text = source.rest();
  const Topology topology = Topology::parse(text, size);
  require(topology.size() == size, "it is of all ranks");
  int members = 0;
  for (int node = 0; node < topology.nodes(); ++node) {
    for (const int rank : topology.ranks_of(node)) {
      require(topology.node_of(rank) == node, "ranks are on their nodes");
      require(topology.ranks_of(node)[static_cast<size_t>(topology.local_rank_of(rank))] == rank, "ranks have places");
      require(topology.node_of(topology.leader_of(rank)) == node, "leaders are on the nodes that they lead");
      ++members;
    }
  }
  require(members == size, "each rank is on one node");
  require(Topology::parse(topology.text(), size).text() == topology.text(), "what was understood can be written");
}

const Registration registration("topology", seeds, parse);

}  // namespace
}  // namespace ours::fuzz
