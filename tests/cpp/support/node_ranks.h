#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "collectives/node/node_group.h"
#include "support/calls.h"
#include "support/ranks.h"
#include "transport/node/node_barrier.h"

namespace ours::testing {

using Sessions = std::vector<std::shared_ptr<NodeSession>>;

/// What the first rank of a node decides besides (see NodeConfig).
struct NodeTerms {
  bool direct = true;
  size_t domains = 0;
  std::vector<int> sockets{};  ///< to which the ranks are bound; empty: as this process is
};

/// Publishes, and waits for the others.
void sync(NodeBarrier& barrier, Deadline deadline, const Shown* shows = nullptr);

/// The number of the last synchronisation in which a rank has arrived.
uint32_t last_synchronisation(const NodeSession& session);

/// The sessions of a node's ranks, which are threads of this process. Chunks have that many bytes; 0 means the default.
Sessions make_sessions(int n, size_t chunk, const NodeTerms& terms = {});

/// The same for ranks that have those heaps.
Sessions make_sessions(const std::vector<std::shared_ptr<ProcessHeaps>>& heaps, size_t chunk,
                       const NodeTerms& terms = {});

/// Rules with which ranks that have such chunks reduce short and long arrays in different ways.
std::string small_node_rules(size_t chunk);

/// Runs fn(session) on such ranks.
void run_sessions(int n, size_t chunk, const std::function<void(std::shared_ptr<NodeSession>)>& fn,
                  const NodeTerms& terms = {});

/// What a rank does; the second argument says how many synchronisations there were since it was called last.
using CountedRank = std::function<void(NodeGroup&, const std::function<uint32_t()>&)>;

/// Runs fn on the ranks of a node, which may read one another's memory if `direct`.
void run_counted(int n, size_t chunk, const CountedRank& fn, bool direct);

}  // namespace ours::testing
