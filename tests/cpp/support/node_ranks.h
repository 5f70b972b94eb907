#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "collectives/node/node_group.h"
#include "support/calls.h"
#include "support/ranks.h"

namespace ours::testing {

using Sessions = std::vector<std::shared_ptr<NodeSession>>;

/// The sessions of a node's ranks, which are threads of this process. Chunks have that many bytes; 0 means the default.
/// `direct`: they read one another's memory.
Sessions make_sessions(int n, size_t chunk, bool direct = true);

/// The same for ranks that have those heaps.
Sessions make_sessions(const std::vector<std::shared_ptr<ProcessHeaps>>& heaps, size_t chunk, bool direct = true);

/// Rules with which ranks that have such chunks reduce short and long arrays in different ways.
std::string small_node_rules(size_t chunk);

/// Runs fn(session) on such ranks.
void run_sessions(int n, size_t chunk, const std::function<void(std::shared_ptr<NodeSession>)>& fn, bool direct = true);

}  // namespace ours::testing
