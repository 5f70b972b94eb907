#pragma once

#include <string>
#include <vector>

namespace ours {

/// Tells which ranks of a group share a node. Equal on all ranks of the group.
class Topology {
 public:
  /// The argument gives each rank's leader, the rank whose memory it was seen to share. Throws Error if a leader does
  /// not lead itself.
  static Topology of(const std::vector<int>& leader_of_rank);

  /// Reads what text() wrote, for a group of `size` ranks. Throws Error if it is something else.
  static Topology parse(const std::string& text, int size);
  std::string text() const;

  int size() const { return static_cast<int>(leaders_.size()); }

  /// Nodes are numbered in the order of their lowest ranks.
  int nodes() const { return static_cast<int>(members_.size()); }
  int node_of(int rank) const { return nodes_.at(static_cast<size_t>(rank)); }

  /// The ranks of a node, ascending.
  const std::vector<int>& ranks_of(int node) const { return members_.at(static_cast<size_t>(node)); }

  /// The place of a rank among the ranks of its node.
  int local_rank_of(int rank) const;

  /// The ranks of other nodes that most collectives connect a rank to, those of equal place in their nodes: on all
  /// other nodes, or, if there are more than `most`, on those a power of two away, as in a ring, and by doubling among
  /// a power of two of nodes.
  std::vector<int> counterparts(int rank, int most) const;

  /// The rank that makes the memory of its node, which all others of the node were seen to reach.
  int leader_of(int rank) const { return leaders_.at(static_cast<size_t>(rank)); }

 private:
  std::vector<int> leaders_;  // by rank
  std::vector<int> nodes_;    // by rank
  std::vector<std::vector<int>> members_;
};

/// Equal for all processes under one kernel, which may have the same loopback.
std::string machine_id();

/// A word that is equal for processes that may share memory. It stands for their kernel, their process namespace, and
/// `node_id`, which is OURS_NODE_ID.
std::string node_identity(const std::string& node_id);

}  // namespace ours
