#include "collectives/hierarchical/node_map.h"

#include <algorithm>

namespace ours {

NodeMap::NodeMap(Topology topology, int rank)
    : topology_(std::move(topology)),
      rank_(rank),
      here_(topology_.node_of(rank)),
      local_(topology_.local_rank_of(rank)) {
  for (int node = 0; node < nodes(); ++node) {
    const auto ranks = static_cast<int>(ranks_of(node).size());
    leaders_.push_back(ranks_of(node)[0]);
    least_ = node == 0 ? ranks : std::min(least_, ranks);
    most_ = std::max(most_, ranks);
  }
}

}  // namespace ours
