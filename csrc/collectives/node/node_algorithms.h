#pragma once

#include <cstddef>

#include "collectives/node/node_rounds.h"

// The algorithms of ranks that share memory, each told in the file that has its name.

namespace ours::node {

/// Every rank reduces all of the array: for one that fits into a stage. node_reduce_whole.cpp
void reduce_whole(NodeRounds& rounds, const Running& run, const Reducing& job);

/// Every rank reduces a slice of each chunk, or of the buffers where they lie. node_reduce_direct.cpp
void reduce_direct(NodeRounds& rounds, const Running& run, const Reducing& job);

/// After all ranks have published where in the heap their data lies: reduces it there. node_reduce_in_heap.cpp
void reduce_in_heap(NodeRounds& rounds, const Running& run, const Reducing& job);

/// node_reduce_scatter.cpp
void reduce_scatter(NodeRounds& rounds, const Running& run, const Scattering& job);

/// All that moves data unchanged. node_exchange.cpp
void exchange(NodeRounds& rounds, const Running& run, const ExchangePlan& plan);

/// After a synchronisation with which all ranks published the sizes of their plans: throws MismatchError unless they
/// agree; returns the bytes of the longest message.
size_t check_published_sizes(const NodeRounds& rounds, const CallRecord& record);

/// The `number`-th monitored barrier of the session. node_monitored_barrier.cpp
void monitored_barrier(NodeSession& session, const Call& call, uint32_t number, bool wait_all_ranks);

/// What leaves the cache before it is read again is copied around it, unless it is so short that the fence behind that
/// would cost more. `total`: bytes of all that the operation copies in this way.
void copy_result(void* to, const void* from, size_t bytes, size_t total);

}  // namespace ours::node
