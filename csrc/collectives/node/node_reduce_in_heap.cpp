#include <algorithm>

#include "collectives/node/node_algorithms.h"
#include "common/cache_bytes.h"
#include "common/partition.h"

// all_reduce of data that lies in the heap on all ranks, in one piece or in several.
//
// Nothing is copied: the rank that reduces a share of the elements reads it from all ranks' buffers and writes the
// result back to all of them. Every byte is read once and written once, and there are two synchronisations: all
// buffers are ready; all results are written. Since any rank can reduce any share, shares go to the next rank that
// asks. If ranks outnumber cores, the running ranks do the work of those that wait for a core (self-scheduling: Tang
// and Yew 1986).

namespace ours::node {

size_t piece_bytes(int ranks) {
  constexpr size_t kMost = 32 * 1024;
  constexpr size_t kUsual = 512 * 1024;  // where the system does not say
  static const size_t cache = cache_bytes(Cache::Second).value_or(kUsual);
  const size_t fits = cache / (2 * static_cast<size_t>(ranks));
  return std::clamp<size_t>(fits / kCacheLine * kCacheLine, 16 * kCacheLine, kMost);
}

size_t share_bytes(size_t bytes, int ranks) {
  constexpr size_t kLeast = 4 * 1024, kMost = 128 * 1024;
  return std::clamp<size_t>(bytes / static_cast<size_t>(ranks) / kCacheLine * kCacheLine, kLeast, kMost);
}

void reduce_in_heap(NodeRounds& rounds, const Running& run, const Reducing& job) {
  const size_t element = size_of(run.call.dtype);
  const int ranks = rounds.size();
  Sources sources(ranks);
  HeapBuffers buffers(rounds.places(), rounds.rank(), ranks, job.in, element);
  rounds.write().begin();
  const size_t piece = piece_bytes(ranks) / element;
  const size_t part = share_bytes(job.in.count() * element, ranks) / element;
  const auto reduce_some = [&](size_t at, size_t end) {
    const size_t count = buffers.find(at, std::min(end, at + piece));
    void* const result = buffers.found(rounds.rank());
    rounds.fill(sources, [&](int r) { return buffers.found(r); });
    reduce(result, sources.data(), ranks, count, run.call.dtype, job.reduction);
    for (int r = 0; r < ranks; ++r) {
      if (r != rounds.rank()) rounds.write().copy(buffers.found(r), result, count * element);
    }
    return count;
  };

  std::atomic<uint64_t>& taken = rounds.session().header().shares_taken;
  while (true) {
    const Slice share = piece_of(job.in.count(), part, taken.fetch_add(1, std::memory_order_relaxed));
    if (share.empty()) break;
    for (size_t at = share.begin; at < share.end;) {
      // Peers that have given up use their buffers again, so these must not be written.
      rounds.session().failure().check();
      at += reduce_some(at, share.end);
    }
  }
  rounds.sync(run);
}

}  // namespace ours::node
