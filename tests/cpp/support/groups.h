#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "collectives/group.h"
#include "support/hierarchical_ranks.h"

namespace ours::testing {

/// One way to make a group. A new kind of group is a row of group_kinds().
struct GroupKind {
  std::string name;
  /// Makes the ranks' groups, each of which is used on a thread of its own. Chunks have that many bytes; 0 means the
  /// default.
  std::function<std::vector<std::function<std::shared_ptr<Group>()>>(int ranks, size_t chunk)> make;
  /// The order of sums, and so their bits, depend on where chunks end.
  bool order_by_chunks = false;
  /// Ranks have threads besides their own, for which the tests' machines have no cores, so fewer ranks and sizes are
  /// tried.
  bool many_threads = false;
  /// The ranks compare what they called when results may already have been written.
  bool compares_afterwards = false;
  /// Sums are made over each node's ranks first, and then over nodes, both in the order of ranks.
  bool in_order = true;
  /// Null: all ranks are on one node.
  NodeOf node_of = nullptr;
  /// All ranks must cut an array into the same pieces.
  bool cuts_alike = false;
  /// Whether it has the reduction, of those that are defined for the type.
  bool (*has)(DType dtype, ReduceKind kind) = [](DType, ReduceKind) { return true; };
};

GroupKind node_kind(const std::string& name, Setting write_around, const std::string& rules = "",
                    const NodeTerms& terms = {});

/// `rules`: for the table of algorithms, with SMALL for what counts as short. If `engine_polls` has a value, an engine
/// carries the payloads.
GroupKind tcp_kind(const std::string& name, int streams, const std::string& rules,
                   std::optional<bool> engine_polls = std::nullopt);

GroupKind hierarchical_kind(const std::string& name, const HierarchicalLimits& limits, const NodeOf& node_of,
                            const std::string& rules = "", std::optional<bool> engine_polls = std::nullopt);

/// The kinds of groups over host memory.
const std::vector<GroupKind>& group_kinds();

/// Runs fn(group) on the ranks of a group of that kind.
void run_groups(const GroupKind& kind, int ranks, size_t chunk, const std::function<void(Group&)>& fn);

}  // namespace ours::testing
