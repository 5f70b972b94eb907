#pragma once

#include <cstddef>
#include <vector>

#include "collectives/hierarchical/rail.h"

namespace ours {

/// A rail in which every node talks to its two neighbours only (Patarasuk and Yuan 2009, "Bandwidth optimal
/// all-reduce algorithms for clusters of workstations"): however many nodes there are, a rank needs two connections.
/// The slice of a chunk is cut into a part for each of the H nodes. In step t of the reduce-scatter, node m sends
/// part m - 1 - t to node m + 1, gets part m - 2 - t from node m - 1 and adds its own to it; after H - 1 steps it
/// holds all of part m. In step t of the all-gather it sends part m - t on and gets part m - 1 - t. Each node sends 2
/// (H - 1) / H of the array.
///
/// Part p is added up in the order of nodes p + 1, p + 2, ..., p, wrapping around. Partial sums travel in the type of
/// the call: a half type is rounded H - 1 times. All nodes get all results, even those that do not want them.
///
/// Chunks overlap: up to window() of them are under way. Each begins when the one before has done a share of its
/// steps, so that the steps of one chunk fill the waits of the others. On a connection all messages go in one order,
/// which follows from the numbers of chunks and steps alone.
class RailRing final : public Rail {
 public:
  /// Needs two nodes or more.
  RailRing(TcpCall& tcp, Job job);

  void advance() override;
  bool may_begin() const override { return true; }
  void begin() override;
  bool done(size_t chunk) override;

 private:
  /// The place of a message among all that go to, or come from, a neighbour: which step of which chunk. Messages are
  /// ordered by tick, which is when the step would happen if all took equally long, and then by chunk.
  struct Place {
    size_t tick = 0;
    size_t chunk = 0;
  };

  struct State {
    Tally arrived[2];  ///< in even and odd steps
    Tally sent;
    // How many receives of steps have been posted so far.
    size_t posted = 0;
    size_t taken = 0;
    size_t passed_on = 0;
  };

  size_t steps() const { return 2 * (nodes() - 1); }
  bool reduces(size_t step) const { return step < nodes() - 1; }
  size_t step_of(const Place& place) const { return place.tick - place.chunk * stagger_; }
  void next(Place& place) const;
  bool over(const Place& place) const { return place.chunk >= chunks_; }

  /// The parts that are sent and received in a step.
  size_t sent_part(size_t step) const;
  size_t received_part(size_t step) const { return sent_part(step + 1); }
  TcpCall::Message message(int peer, size_t chunk, size_t step, size_t part) const;
  std::byte* incoming(size_t chunk, size_t step) const;

  bool post();
  bool take();
  bool send();

  State& state(size_t chunk) { return states_[chunk % slots_]; }
  const State& state(size_t chunk) const { return states_[chunk % slots_]; }

  const size_t part_bytes_;
  const size_t stagger_;  ///< ticks between the beginnings of two chunks
  size_t begun_ = 0;
  Place posting_, taking_, sending_;
  const Reduction partial_;
  std::vector<State> states_;
};

}  // namespace ours
