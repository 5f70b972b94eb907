#pragma once

#include <vector>

#include "transport/topology.h"

namespace ours {

/// The nodes of a group, as one of its ranks sees them.
class NodeMap {
 public:
  NodeMap(Topology topology, int rank);

  int rank() const { return rank_; }
  int size() const { return topology_.size(); }
  int nodes() const { return topology_.nodes(); }
  /// This rank's node, and its number in it.
  int here() const { return here_; }
  int local() const { return local_; }
  bool is_leader() const { return local_ == 0; }
  /// The first rank of each node.
  const std::vector<int>& leaders() const { return leaders_; }

  /// The ranks of this node, and of any node.
  const std::vector<int>& members() const { return topology_.ranks_of(here_); }
  const std::vector<int>& ranks_of(int node) const { return topology_.ranks_of(node); }
  int node_of(int rank) const { return topology_.node_of(rank); }
  int local_rank_of(int rank) const { return topology_.local_rank_of(rank); }

  /// Ranks of the smallest node, and of the largest one.
  int least_local() const { return least_; }
  int most_local() const { return most_; }

 private:
  const Topology topology_;
  const int rank_;
  const int here_;
  const int local_;
  std::vector<int> leaders_;
  int least_ = 0;
  int most_ = 0;
};

}  // namespace ours
