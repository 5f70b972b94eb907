#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

#include "collectives/exchange_plan.h"
#include "collectives/hierarchical/node_map.h"

namespace ours {

/// Who hands on whose messages, if a rank sends what it has for the ranks of another node to one of them, its relay:
/// the one of equal place in the node, or, where nodes have fewer ranks, one that several ranks share. Pure arithmetic.
///
/// Nodes are visited in steps: in step i, a node sends to the i-th after it, and gets from the i-th before it, so that
/// they do not all send to the same one at once.
class Relays {
 public:
  /// `plan` says which ranks send anything to which.
  Relays(const NodeMap& map, const ExchangePlan& plan) : map_(map), plan_(plan), sources_(map.members().size()) {
    for (size_t step = 1; step <= steps(); ++step) {
      const int node = from(step);
      const size_t ranks = map_.ranks_of(node).size();
      for (size_t first = 0; first < ranks; first += map_.members().size()) {
        add_sources(node, step, first);
      }
    }
  }

  size_t steps() const { return static_cast<size_t>(map_.nodes() - 1); }
  int to(size_t step) const { return (map_.here() + static_cast<int>(step)) % map_.nodes(); }
  int from(size_t step) const { return (map_.here() + map_.nodes() - static_cast<int>(step)) % map_.nodes(); }

  /// The rank of another node that hands on what this rank sends to that node.
  int relay_on(int node) const {
    const std::vector<int>& ranks = map_.ranks_of(node);
    return ranks[static_cast<size_t>(map_.local()) % ranks.size()];
  }

  /// How many ranks there are on other nodes, at most.
  int most_peers() const { return map_.size() - map_.least_local(); }

  /// Whether this rank sends anything to the node of that step.
  bool sends(size_t step) const { return passes(map_.rank(), to(step)); }

  /// The ranks for which a rank of this node is the relay, in the order in which they are served. Where another rank of
  /// the node has one more on the same node, -1 stands in its place, so all lists are equally long.
  const std::vector<int>& sources(size_t local) const { return sources_[local]; }
  /// The step in which the source at that place of the list sends.
  size_t step_of(size_t source) const { return steps_[source]; }

 private:
  /// Whether a rank sends anything to a node other than its own.
  bool passes(int rank, int node) const {
    switch (plan_.movement) {
      case Movement::Gather:
        return map_.node_of(plan_.root) == node;
      case Movement::Scatter:
        return rank == plan_.root;
      case Movement::Broadcast:
      case Movement::AllGather:
      case Movement::AllToAll:
        break;
    }
    return true;
  }

  /// Gives each rank of this node one of another node's ranks, from the one at place `first` on. Does nothing if none
  /// of these sends anything here.
  void add_sources(int node, size_t step, size_t first) {
    const std::vector<int>& ranks = map_.ranks_of(node);
    std::vector<int> added;
    for (size_t k = first; k < first + sources_.size(); ++k) {
      added.push_back(k < ranks.size() && passes(ranks[k], map_.here()) ? ranks[k] : -1);
    }
    if (std::all_of(added.begin(), added.end(), [](int rank) { return rank < 0; })) return;
    steps_.push_back(step);
    for (size_t k = 0; k < added.size(); ++k) sources_[k].push_back(added[k]);
  }

  const NodeMap& map_;
  const ExchangePlan& plan_;
  std::vector<std::vector<int>> sources_;  ///< by rank of this node
  std::vector<size_t> steps_;              ///< of each source
};

}  // namespace ours
