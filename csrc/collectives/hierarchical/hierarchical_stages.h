#pragma once

#include <cstddef>

#include "collectives/hierarchical/hierarchical_algorithms.h"

namespace ours::hierarchical {

/// Takes a long message through the node's stages, in which a rail's slice of a chunk has a window of its own. If
/// windows are smaller than slices, a chunk takes several rounds.
class Stages {
 public:
  Stages(HierarchicalRun& run, const Reducing& job, const RailSlices& slices);

  /// Gives this rank's rail its working memory. Only after all ranks of the node have come to this call.
  void give_memory(Rail& rail);

  const RailSlices& slices() const { return slices_; }
  /// The rounds of one chunk.
  size_t rounds() const { return rounds_; }
  size_t all_rounds() const { return slices_.chunks() * rounds_; }

  /// Writes what the others reduce in a round into this rank's stage.
  void copy_in(size_t round);

  /// Reduces this rank's portion from the stages to `slot`, which is the slot of its chunk's slice.
  void reduce(size_t round, std::byte* slot);

  /// Shows the others this rank's results of a round, unless they can read the slot itself.
  void publish(size_t round, const std::byte* slot);

  /// Copies all results of a round to where they belong.
  void copy_out(size_t round);

 private:
  /// A rail's part of a round, in elements.
  Slice portion(size_t round, int rail) const;
  /// Where that part lies in the slot, in bytes.
  size_t offset_of(size_t round, int rail) const;
  /// Where this rank finds a rail's results of a round.
  const std::byte* results_of(size_t round, int rail) const;

  HierarchicalRun& run_;
  NodeRounds& node_;
  const int local_;
  const Reducing& job_;
  const RailSlices slices_;
  const size_t element_;
  size_t window_;  ///< elements
  size_t rounds_;
  /// Slices are small enough for rails to work where the node shows its results.
  bool shown_;
};

}  // namespace ours::hierarchical
