#include <algorithm>
#include <deque>

#include "collectives/node/node_algorithms.h"
#include "common/partition.h"

// all_reduce of arrays that ranks read where they lie in the memory of others. A rank reads its slice of all arrays,
// reduces it in place, and then reads the other slices of the result from the ranks that have reduced them: a
// reduce-scatter and an all-gather (Rabenseifner 2004). Between the two, all ranks wait for one another, and once more
// in the end, so that nobody changes what a peer still reads. A slice is only ever written by its rank before, and by
// the others after.

namespace ours::node {

namespace {

/// The part of each peer's slice that is read at a time. To read less costs more system calls, and more leaves the
/// cache before it is reduced.
constexpr size_t kPart = size_t{128} << 10;

/// From one peer's part to the next one's: an odd number of cache lines, since lines that lie equally in their pages
/// share a few places of the first-level cache.
size_t stride_bytes(const NodeRounds& rounds) {
  const size_t fits = rounds.chunk_bytes() / static_cast<size_t>(std::max(rounds.size() - 1, 1));
  const size_t lines = std::max(std::min(kPart + kCacheLine, fits) / kCacheLine, size_t{1});
  return ((lines - 1) | 1) * kCacheLine;
}

}  // namespace

LentReduction::LentReduction(NodeRounds& rounds, const Running& run, const Reduction& reduction)
    : rounds_(rounds),
      dtype_(run.call.dtype),
      reduction_(reduction),
      element_(size_of(dtype_)),
      stride_(stride_bytes(rounds)),
      part_(std::min(kPart, stride_) / element_),
      scratch_(rounds.next_stage()),  // which nobody reads
      sources_(rounds.size()) {}

void LentReduction::reduce_part(std::byte* out, size_t count) {
  ours::reduce(out, sources_.data(), rounds_.size(), count, dtype_, reduction_, rounds_.write().around());
}

void reduce_lent(NodeRounds& rounds, const Running& run, const Reducing& job) {
  const size_t element = size_of(run.call.dtype);
  const auto what = [&run] { return describe_record(run.record); };
  std::deque<Pieces> lent;  // by rank; their addresses are those of other processes
  for (int r = 0; r < rounds.size(); ++r) lent.emplace_back(rounds.places().lent_by(r), element);
  const auto read = [&](int from, size_t begin, size_t count, std::byte* to) {
    lent[static_cast<size_t>(from)].visit(begin, begin + count, [&](std::byte* there, size_t at, size_t n) {
      rounds.session().read(from, to + at * element, reinterpret_cast<uint64_t>(there), n * element, what);
    });
  };
  const auto slice_of_rank = [&](int r) { return slice_of(job.in.count(), rounds.size(), r, kCacheLine / element); };

  LentReduction reduction(rounds, run, job.reduction);
  const Slice own = slice_of_rank(rounds.rank());
  job.in.visit(own.begin, own.end, [&](std::byte* data, size_t at, size_t n) {
    reduction.reduce(data, data, n, [&](int from, size_t offset, size_t count, std::byte* to) {
      read(from, own.begin + at + offset, count, to);
    });
  });
  rounds.sync(run);
  for (int i = 1; i < rounds.size(); ++i) {
    const int from = (rounds.rank() + i) % rounds.size();
    const Slice slice = slice_of_rank(from);
    job.in.visit(slice.begin, slice.end,
                 [&](std::byte* data, size_t at, size_t n) { read(from, slice.begin + at, n, data); });
  }
  rounds.sync(run);
}

}  // namespace ours::node
