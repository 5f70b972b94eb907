#pragma once

#include <cstddef>

#include "collectives/hierarchical/hierarchical_algorithms.h"
#include "collectives/node/places.h"

namespace ours::hierarchical {

/// Takes a long message through the node's stages, in which a rail's slice of a chunk has a window of its own. If
/// windows are smaller than slices, a chunk takes several rounds.
///
/// A rail's team is its rank and the ranks that help it, each with an equal part of every window. If it has any, rails
/// get what their teams have reduced a round later, from the helpers' stages: there each rank has room for its own
/// part, which it need not stage. What rails publish goes where the team's results are read, a part to each member's.
class Stages {
 public:
  Stages(HierarchicalRun& run, const Reducing& job, const RailSlices& slices);

  /// Gives this rank's rail its working memory. Only after all ranks of the node have come to this call.
  void give_memory(Rail& rail);

  const RailSlices& slices() const { return slices_; }
  /// Whether rails have helpers.
  bool helped() const { return team_ > 1; }
  /// The rounds of one chunk.
  size_t rounds() const { return rounds_; }
  size_t all_rounds() const { return slices_.chunks * rounds_; }

  /// From now on reads inputs where the ranks of the node have published them. Only if rails have helpers.
  void read_from(HeapBuffers& buffers) { buffers_ = &buffers; }

  /// Writes what the others reduce in a round into this rank's stage.
  void copy_in(size_t round);

  /// Reduces this rank's part, if it has any: to the slot of its chunk's slice, or for collect().
  void reduce(size_t round, Rail* rail);

  /// With helpers, in the round after this one: puts what the rail's team has reduced into the slot.
  void collect(size_t round, std::byte* slot);

  /// Shows the others this rank's results of a round, unless they can read the slot itself.
  void publish(size_t round, const std::byte* slot);

  /// Copies all results of a round to where they belong.
  void copy_out(size_t round);

 private:
  /// A rail's portion of a round, and the part of it that a member of its team has, in elements.
  Slice portion(size_t round, int rail) const;
  Slice part(size_t round, int rail, int member) const;
  /// The rank that is this member of a rail's team.
  int rank_of(int rail, int member) const { return rail + member * slices_.rails; }
  bool has_part() const { return local_ < team_ * slices_.rails; }
  /// Where elements of a rail's slice lie in the slot, in bytes.
  size_t offset_of(size_t round, int rail, const Slice& elements) const;
  /// Where a part lies in a stage, in bytes.
  size_t place_of(int rail, int member) const;
  /// Where this rank finds the results of a part.
  const std::byte* results_of(size_t round, int rail, int member) const;

  HierarchicalRun& run_;
  NodeRounds& node_;
  const int local_;
  const Reducing& job_;
  const RailSlices slices_;
  const size_t element_;
  const int team_;
  size_t part_;  ///< the most elements of a part
  size_t rounds_;
  /// Slices are small enough for rails to work where the node shows its results.
  bool shown_;
  HeapBuffers* buffers_ = nullptr;
};

}  // namespace ours::hierarchical
