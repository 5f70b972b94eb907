#pragma once

#include "collectives/hierarchical/hierarchical_run.h"
#include "collectives/hierarchical/rail.h"
#include "collectives/select.h"

// The algorithms for ranks on several nodes, each explained in the file of the same name.

namespace ours::hierarchical {

/// A reduction of all ranks' `in` for the node `reader`, or for all nodes (-1); `out` is null where it is not wanted.
struct Reducing {
  const Pieces& in;
  const Pieces* out;
  DType dtype;
  Reduction reduction;
  int reader;
  DType travels;  ///< the type of sums between nodes

  size_t element() const { return size_of(dtype); }
};

/// all_reduce and reduce, by the algorithm that the table gives. hierarchical_reduce.cpp
void reduce(HierarchicalRun& run, const Selection& selection, const ours::Reducing& job);

/// Leaders combine the nodes' sums: Whole or Doubling. hierarchical_reduce_short.cpp
void reduce_short(HierarchicalRun& run, const Reducing& job, Algorithm algorithm);

/// Rails reduce slices: Direct or Ring. hierarchical_reduce_long.cpp
void reduce_long(HierarchicalRun& run, const Reducing& job, Algorithm algorithm);
/// Takes a long message through the node's stages. hierarchical_reduce_staged.cpp
class Stages;
void reduce_staged(HierarchicalRun& run, Stages& stages, Rail* rail);
/// Works without stages: the data of all ranks of the node lies in its heap, or anywhere if the node has only one
/// rank. hierarchical_reduce_in_place.cpp
void reduce_in_place(HierarchicalRun& run, const Reducing& job, const RailSlices& slices, Rail* rail);
/// Gives a rail working memory that no other rank reads.
void give_scratch(HierarchicalRun& run, Rail& rail);

/// hierarchical_reduce_scatter.cpp
void reduce_scatter(HierarchicalRun& run, const Scattering& job);

/// hierarchical_broadcast.cpp
void broadcast(HierarchicalRun& run, const ExchangePlan& plan);

/// hierarchical_all_gather.cpp
void all_gather(HierarchicalRun& run, const ExchangePlan& plan);

/// gather, scatter and all_to_all. hierarchical_exchange.cpp
void exchange(HierarchicalRun& run, const ExchangePlan& plan);

}  // namespace ours::hierarchical
