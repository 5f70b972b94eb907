#pragma once

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
  Relays(const NodeMap& map, const ExchangePlan& plan) : map_(map), plan_(plan) {
    for (size_t step = 1; step <= steps(); ++step) {
      const int node = from(step);
      const size_t ranks = map_.ranks_of(node).size();
      for (size_t first = 0; first < ranks; first += map_.members().size()) {
        if (is_used(node, first)) slots_.push_back({step, first});
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
  std::vector<int> sources(int local) const {
    std::vector<int> sources;
    for (const Slot& slot : slots_) {
      const std::vector<int>& ranks = map_.ranks_of(from(slot.step));
      const size_t place = slot.first + static_cast<size_t>(local);
      const bool exists = place < ranks.size() && passes(ranks[place], map_.here());
      sources.push_back(exists ? ranks[place] : -1);
    }
    return sources;
  }
  /// The step in which the source at that place of the list sends.
  size_t step_of(size_t source) const { return slots_[source].step; }

 private:
  struct Slot {
    size_t step;
    size_t first;  ///< the source of the node's first rank, as a place in the other node
  };

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

  /// Whether any of the ranks from `first` on, one for each rank of this node, sends anything to it.
  bool is_used(int node, size_t first) const {
    const std::vector<int>& ranks = map_.ranks_of(node);
    for (size_t k = first; k < first + map_.members().size() && k < ranks.size(); ++k) {
      if (passes(ranks[k], map_.here())) return true;
    }
    return false;
  }

  const NodeMap& map_;
  const ExchangePlan& plan_;
  std::vector<Slot> slots_;
};

}  // namespace ours
