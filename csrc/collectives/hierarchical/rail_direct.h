#pragma once

#include <cstddef>
#include <vector>

#include "collectives/hierarchical/rail.h"

namespace ours {

/// A rail in which all nodes talk to all. The slice of a chunk is divided among the nodes once more: node m gets part
/// m of all others' slices, reduces them, and sends the result to all, which is a reduce-scatter and an all-gather
/// (Rabenseifner 2004). Each node sends 2 (H - 1) / H of the array, which is the minimum.
///
/// Chunks overlap: while the parts of one are reduced, those of the next and the results of the one before are on
/// their way. On each connection all messages go in one order: the parts of chunk t, then the results of chunk t -
/// lag.
///
/// float32 may travel as one of its half types (`travels`): parts and results are rounded once each for the journey,
/// and added up in float32. With s(n) for the sums of nodes, and u for half a unit in the last place (2^-8 of a
/// bfloat16, 2^-11 of a float16 that is not subnormal), a result is off by at most u (|s(1)| + ... + |s(H)| +
/// |result|), beside the roundings of float32. The reducer of a part takes its own result as the others get it, so
/// all have the same bits.
class RailDirect final : public Rail {
 public:
  RailDirect(TcpCall& tcp, Job job);

  void advance() override;
  bool may_begin() const override { return may_tick(); }
  void begin() override { tick(); }
  bool done(size_t chunk) override;

 private:
  /// How many chunks lie between a part and its result, so that neither waits for the other.
  static constexpr size_t kLag = (window() - 1) / 2;

  struct State {
    Tally arrived;  ///< inputs of this rank's part
    Tally results;
    Tally sent;
    bool widened = false;  ///< the results are in the slot as float32
  };

  bool converts() const { return job_.travels != job_.dtype; }
  bool reads(size_t node) const { return job_.reader < 0 || job_.reader == static_cast<int>(node); }
  bool may_tick() const { return next_ < kLag || next_ - kLag >= chunks_ || all_here(next_ - kLag); }
  bool all_here(size_t chunk) const { return state(chunk).arrived.complete(); }
  /// Sends the parts of chunk next_ and the results of chunk next_ - kLag.
  void tick();
  void exchange_parts(size_t chunk);
  void reduce_part(size_t chunk);
  void reduce_converting(size_t chunk, const Slice& mine);
  TcpCall::Message message(size_t node, size_t chunk, bool result, size_t elements) const;
  std::byte* input(size_t chunk, size_t node) const;
  /// The slice as it travels; the slot itself if nothing is converted.
  std::byte* travelling(size_t chunk) const {
    return converts() ? work(chunk) + (nodes() - 1) * part_bytes_ : slot(chunk);
  }
  State& state(size_t chunk) { return states_[chunk % slots_]; }
  const State& state(size_t chunk) const { return states_[chunk % slots_]; }

  const size_t travelling_element_;
  const size_t part_bytes_;
  const size_t travelling_bytes_;
  size_t next_ = 0;
  std::vector<State> states_;
  std::vector<float> widened_;
};

}  // namespace ours
