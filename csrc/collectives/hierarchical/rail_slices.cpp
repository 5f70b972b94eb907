#include "collectives/hierarchical/rail_slices.h"

#include <algorithm>

#include "transport/node/node_layout.h"

namespace ours {

namespace {

/// A core moves some 2 GB/s through a socket, so that many fill a link of 100 Gbit/s.
constexpr size_t kFillLink = 8;

/// With that many chunks, all but a quarter of the work in the nodes overlaps with what is on the wire.
constexpr size_t kOverlap = 4;

}  // namespace

RailSlices choose_rails(const RailCase& array) {
  const auto nodes = static_cast<size_t>(array.nodes);
  const auto ranks = static_cast<size_t>(array.most_rails);
  RailSlices slices{array.count, 1, 1, kCacheLine / array.element};
  // Slices for which each node gets a large enough part; parts differ by a cache line.
  const size_t worth_it = array.count * array.travels / (nodes * (array.least_part() + kCacheLine));
  if (worth_it == 0) return slices;
  const size_t wanted = std::max(worth_it / kOverlap, std::min(worth_it, kFillLink));
  size_t rails = std::min(ranks, wanted);
  // Ranks beyond whole teams have nothing to do, so there are fewer of them than a team has.
  while (ranks % rails >= ranks / rails && rails != ranks) --rails;
  slices.rails = static_cast<int>(rails);
  slices.chunks =
      std::clamp<size_t>(piece_count(array.count * array.element, array.least_chunk()), 1, worth_it / rails);
  return slices;
}

}  // namespace ours
