#pragma once

#include <cstddef>

#include "collectives/select.h"
#include "common/partition.h"
#include "transport/tcp/tcp_config.h"

namespace ours {

/// How an array is divided between rails: into chunks, each of which is cut into one slice per rail, and each slice
/// into one part per node, which is what a message between nodes holds. Pure arithmetic, with the same result on all
/// ranks.
struct RailSlices {
  size_t count;   ///< elements of the array
  size_t chunks;  ///< nearly equal ones; at least 1
  int rails;
  size_t align;  ///< slices and parts end at multiples of so many elements

  /// A rail's elements of a chunk.
  Slice of(size_t chunk, int rail) const {
    const Slice all = slice_of(count, static_cast<int>(chunks), static_cast<int>(chunk), align);
    const Slice part = slice_of(all.size(), rails, rail, align);
    return {all.begin + part.begin, all.begin + part.end};
  }

  /// The most elements that of() gives any rail.
  size_t longest() const { return of(0, 0).size(); }

  /// The elements of such a slice that belong to a node, counted from the slice's first.
  Slice part_of(size_t chunk, int rail, int node, int nodes) const {
    return slice_of(of(chunk, rail).size(), nodes, node, align);
  }
};

/// What the number of rails and of chunks depends on.
struct RailCase {
  size_t count;    ///< elements of the array
  size_t element;  ///< bytes
  size_t travels;  ///< bytes of an element on the wire
  int nodes;       ///< at least 2
  int most_rails;  ///< ranks of the smallest node
  Algorithm algorithm;
  size_t wire_chunk = TcpPlan().chunk_bytes;

  /// The bytes that make a message worth its overhead. One of 8 KiB costs a core about as much for its bytes as for
  /// itself. The steps of a ring follow one another, so it needs longer ones.
  size_t least_part() const { return wire_chunk / (algorithm == Algorithm::Ring ? 16 : 32); }
  /// Chunks have no fewer bytes, unless the array has.
  size_t least_chunk() const { return 2 * wire_chunk; }
};

/// Chooses how many rails an array takes, and in how many chunks. No part has less than least_part(), unless the array
/// divided by the nodes is shorter than that: then a single rail takes it in one chunk.
///
/// What there is beyond that becomes rails first, until they fill a link, then chunks, until several of them overlap,
/// and then rails again. The ranks of a node without a rail help those that have one (hierarchical_reduce_staged.cpp),
/// equally many each, so there are only as many rails as leave few ranks idle.
RailSlices choose_rails(const RailCase& array);

}  // namespace ours
