#include <algorithm>
#include <cstring>

#include "collectives/node/domain_part.h"
#include "collectives/node/node_algorithms.h"
#include "collectives/partial_sums.h"
#include "common/cache_bytes.h"
#include "common/partition.h"

// all_reduce and reduce of large arrays, in chunks through a pipeline of three steps that share one round, so that n
// chunks cost n + 1 synchronisations. In round k a rank reduces its slice of chunk k (read from the stages), copies
// the reduced chunk k - 1 out of the ranks' results, and copies chunk k + 1 into its stage. This is a reduce-scatter
// followed by an all-gather (Rabenseifner 2004), with shared memory in place of messages; stages and results stay in
// the cache. A rank's own slice is read where it lies and never staged. (Results have places of their own: in the gap
// that this leaves in the stage, they took longer.)
//
// Where the ranks are divided into domains, each adds its ranks' data to the sum of the domains before it, a round
// after them, and the ranks of the last one have the result. Those of the others fetch a slice of it each, and share
// them. So of each chunk only one sum goes from domain to domain, and one result to each.
//
// Arrays that lie in the heap on all ranks need no stages (node_reduce_in_heap.cpp), nor do those that all ranks lend
// one another (node_reduce_lent.cpp); the first synchronisation shows whether they do.
//
// Each element is reduced in one order, that of Domains, whatever the size of array and chunk, so the bits are always
// the same.

namespace ours::node {

namespace {

/// Where the pieces of an array are shorter on average, reading each of them costs more than it saves.
constexpr size_t kLeastLent = size_t{64} << 10;

/// Whether there are domains, and the sum of some ranks can be shown to the next domain without loss.
bool goes_by_domain(const NodeRounds& rounds, DType dtype, ReduceKind kind) {
  if (rounds.domains().count() == 1) return false;
  // What is added up in a wider type would be rounded in between, and what is multiplied first would be so again.
  const bool is_half = dtype == DType::Float16 || dtype == DType::BFloat16 || dtype == DType::Complex32;
  return !is_half && kind != ReduceKind::PremulSum;
}

/// The steps of the pipeline, each for one chunk k.
class Chunks {
 public:
  Chunks(NodeRounds& rounds, const Reducing& job, DType dtype)
      : rounds_(rounds),
        job_(job),
        dtype_(dtype),
        element_(size_of(dtype)),
        domains_(goes_by_domain(rounds, dtype, job.reduction.kind) ? rounds.domains() : rounds.together()),
        part_(domains_, rounds.rank(), element_),
        per_chunk_(elements_of_a_chunk()),
        leaves_(leaves_cache(job.in.count() * element_, rounds.size())),
        sources_(rounds.size() + 1) {
    rounds.reserve(part_.is_last() ? 2 : NodeLayout::kResults);
  }

  bool by_domain() const { return part_.count() > 1; }

  /// Writes what the first synchronisation publishes.
  void begin() {
    if (part_.own() == 0) copy_in(0);
  }

  /// Does the rest.
  void finish(const Running& run) {
    const size_t count = piece_count(job_.in.count(), per_chunk_);
    // How many rounds after the first domain's stages of a chunk are there.
    const auto own = static_cast<size_t>(part_.own());
    const auto reduced = static_cast<size_t>(part_.count());
    const size_t fetched = reduced + (by_domain() ? 1 : 0);
    const auto is_due = [&](size_t round, size_t delay) { return round >= delay && round - delay < count; };
    for (size_t round = 0; round < count + fetched; ++round) {
      if (round > 0) rounds_.sync(run);
      if (is_due(round, own)) reduce_own(round - own);
      if (is_due(round, reduced) && !part_.is_last()) fetch(round - reduced);
      const size_t shown = part_.is_last() ? reduced : fetched;
      if (is_due(round, shown)) copy_out(round - shown);
      if (is_due(round + 1, own)) copy_in(round + 1 - own);
    }
  }

 private:
  size_t elements_of_a_chunk() const {
    const NodeLayout& layout = rounds_.session().layout();
    // A rank's slice, rounded up to a cache line, has to fit into the place for a result.
    const size_t fits = static_cast<size_t>(domains_.smallest()) * (layout.result_bytes() - kCacheLine);
    return std::min(layout.chunk_bytes, fits) / element_;
  }

  Slice chunk(size_t k) const { return piece_of(job_.in.count(), per_chunk_, k); }

  void copy_in(size_t k) {
    const Slice all = chunk(k);
    const Slice own = part_.own_slice(all.size());
    std::byte* const stage = rounds_.next_stage();
    for (const Slice& part : {Slice{0, own.begin}, Slice{own.end, all.size()}}) {
      rounds_.copy(job_.in, {all.begin + part.begin, all.begin + part.end}, stage + part.begin * element_, element_);
    }
  }

  void reduce_own(size_t k) {
    const Slice all = chunk(k);
    const Slice own = part_.own_slice(all.size());
    if (part_.own() == 0) return reduce_slice(all, own, rounds_.next_result(), nullptr);
    visit_results(part_.own() - 1, all.size(), [&](const std::byte* before, const Slice& slice) {
      reduce_slice(all, slice, rounds_.next_result() + (slice.begin - own.begin) * element_, before);
    });
  }

  /// `before`: the sum of the domains before this one.
  void reduce_slice(const Slice& all, const Slice& slice, std::byte* to, const std::byte* before) {
    const Reduction reduction = part_.is_last() ? job_.reduction : plain(job_.reduction);
    job_.in.visit(all.begin + slice.begin, all.begin + slice.end, [&](std::byte* data, size_t at, size_t n) {
      const int sources = part_.fill(sources_, before == nullptr ? nullptr : before + at * element_, [&](int rank) {
        return rank == rounds_.rank() ? data : rounds_.stage_of(rank) + (slice.begin + at) * element_;
      });
      reduce(to + at * element_, sources_.data(), sources, n, dtype_, reduction, rounds_.write().around());
    });
  }

  /// Calls visit(data, slice) for the parts of this rank's slice that the ranks of a domain have reduced.
  template <class Visit>
  void visit_results(int domain, size_t size, Visit&& visit) const {
    part_.visit_reduced(domain, size, [&](int rank, const Slice& slice) {
      visit(rounds_.result_of(rank) + (slice.begin - part_.slice(rank, size).begin) * element_, slice);
    });
  }

  /// Copies this rank's slice of the result to where its domain reads it.
  void fetch(size_t k) {
    if (job_.root >= 0 && domains_.domain_of(job_.root) != part_.own()) return;
    const size_t size = chunk(k).size();
    const size_t begin = part_.own_slice(size).begin;
    std::byte* const to = fetched(rounds_.rank(), k);
    visit_results(part_.last(), size, [&](const std::byte* from, const Slice& slice) {
      std::memcpy(to + (slice.begin - begin) * element_, from, slice.size() * element_);
    });
  }
  /// Where a rank puts what it fetches of chunk k.
  std::byte* fetched(int rank, size_t k) const { return rounds_.result(rank, 2 + k % 2); }

  void copy_out(size_t k) {
    if (job_.out == nullptr) return;
    const Slice all = chunk(k);
    part_.visit_own([&](int rank) {
      const Slice slice = part_.slice(rank, all.size());
      const std::byte* const from = part_.is_last() ? rounds_.result_of(rank) : fetched(rank, k);
      job_.out->visit(all.begin + slice.begin, all.begin + slice.end, [&](std::byte* data, size_t at, size_t n) {
        copy_result(data, from + at * element_, n * element_, leaves_);
      });
    });
  }

  NodeRounds& rounds_;
  const Reducing& job_;
  const DType dtype_;
  const size_t element_;
  const Domains& domains_;
  const DomainPart part_;
  const size_t per_chunk_;
  const bool leaves_;
  Sources sources_;
};

}  // namespace

bool leaves_cache(size_t bytes, int ranks) {
  constexpr size_t kMayLeave = size_t{4} << 20;
  static const size_t cache = cache_bytes(Cache::Last).value_or(0);
  return bytes >= kMayLeave && bytes > cache / 2 / static_cast<size_t>(ranks);
}

void copy_result(void* to, const void* from, size_t bytes, bool leaves) {
  constexpr size_t kLeastStreamed = 4096;
  copy_bytes(to, from, bytes, leaves && bytes >= kLeastStreamed);
}

void reduce_direct(NodeRounds& rounds, const Running& run, const Reducing& job) {
  const DType dtype = run.call.dtype;
  const size_t element = size_of(dtype);
  const size_t bytes = job.in.count() * element;
  rounds.note_use(job.in, element);
  if (job.out != nullptr && job.out != &job.in) rounds.note_use(*job.out, element);
  rounds.write().begin();

  Chunks chunks(rounds, job, dtype);
  const bool in_place = job.out == &job.in;
  const auto all = static_cast<uint32_t>(rounds.size());
  const bool published = in_place && rounds.places().publish(job.in, element);
  const bool can_lend = in_place && !published && bytes >= job.in.places() * kLeastLent;
  // What only the root gets is not lent.
  LendTiming timing(rounds.reductions(), job.root < 0 ? bytes : 0, rounds.session(), can_lend);
  const bool lends = can_lend && timing.lends() && rounds.places().lend(job.in, element);
  if (!published && !lends) chunks.begin();
  rounds.open(run, {0, 0, lends ? 1U : 0U, published ? 1U : 0U}, timing.arrive());
  timing.go_on(rounds.lend_next());
  const Exchanged shown = rounds.exchanged();
  if (shown.in_heap == all) {
    return chunks.by_domain() ? reduce_in_heap_by_domain(rounds, run, job) : reduce_in_heap(rounds, run, job);
  }
  rounds.places().forget();
  if (shown.lenders == all) {
    reduce_lent(rounds, run, job);
    return timing.end();
  }
  if (shown.in_heap + shown.lenders > 0) {
    // Some ranks have published where their data lies, but not all of them.
    chunks.begin();
    rounds.sync(run);
  }
  chunks.finish(run);
  timing.end();
}

}  // namespace ours::node
