#include <cstring>

#include "collectives/node/node_algorithms.h"
#include "common/cache_bytes.h"
#include "common/partition.h"

// all_reduce and reduce of large arrays, in chunks through a pipeline of three steps that share one round, so that n
// chunks cost n + 1 synchronisations. In round k a rank reduces its slice of chunk k (read from the stages), copies
// the reduced chunk k - 1 out of the ranks' results, and copies chunk k + 1 into its stage. This is a reduce-scatter
// followed by an all-gather (Rabenseifner 2004), with shared memory in place of messages; stages and results stay in
// the cache. A rank's own slice is read where it lies and never staged.
//
// Arrays that lie in the heap on all ranks need no stages (node_reduce_in_heap.cpp), nor do those that all ranks lend
// one another (node_reduce_lent.cpp); the first synchronisation shows whether they do.
//
// Each element is reduced in the order of ranks whatever the size of array and chunk, so the bits are always the
// same.

namespace ours::node {

namespace {

/// Where the pieces of an array are shorter on average, reading each of them costs more than it saves.
constexpr size_t kLeastLent = size_t{64} << 10;

/// The steps of the pipeline, each for one chunk k.
class Chunks {
 public:
  Chunks(NodeRounds& rounds, const Reducing& job, DType dtype)
      : rounds_(rounds),
        job_(job),
        dtype_(dtype),
        element_(size_of(dtype)),
        per_chunk_(rounds.chunk_bytes() / element_),
        leaves_(leaves_cache(job.in.count() * element_, rounds.size())),
        sources_(rounds.size()) {}

  size_t count() const { return piece_count(job_.in.count(), per_chunk_); }

  void copy_in(size_t k) {
    const Slice all = chunk(k);
    const Slice own = slice_of_rank(all, rounds_.rank());
    std::byte* const stage = rounds_.next_stage();
    for (const Slice& part : {Slice{all.begin, own.begin}, Slice{own.end, all.end}}) {
      rounds_.copy(job_.in, part, stage + (part.begin - all.begin) * element_, element_);
    }
  }

  void reduce_own(size_t k) {
    const Slice all = chunk(k);
    const Slice own = slice_of_rank(all, rounds_.rank());
    std::byte* const to = rounds_.next_result();
    const size_t from = own.begin - all.begin;
    job_.in.visit(own.begin, own.end, [&](std::byte* data, size_t at, size_t n) {
      for (int r = 0; r < rounds_.size(); ++r) sources_.data()[r] = rounds_.stage_of(r) + (from + at) * element_;
      sources_.data()[rounds_.rank()] = data;
      reduce(to + at * element_, sources_.data(), rounds_.size(), n, dtype_, job_.reduction, rounds_.write().around());
    });
  }

  void copy_out(size_t k) {
    if (job_.out == nullptr) return;
    const Slice all = chunk(k);
    for (int r = 0; r < rounds_.size(); ++r) {
      const Slice part = slice_of_rank(all, r);
      const std::byte* const from = rounds_.result_of(r);
      job_.out->visit(part.begin, part.end, [&](std::byte* data, size_t at, size_t n) {
        copy_result(data, from + at * element_, n * element_, leaves_);
      });
    }
  }

 private:
  Slice chunk(size_t k) const { return piece_of(job_.in.count(), per_chunk_, k); }
  /// The part of a chunk that rank r reduces.
  Slice slice_of_rank(const Slice& all, int r) const {
    const Slice part = slice_of(all.size(), rounds_.size(), r, kCacheLine / element_);
    return {all.begin + part.begin, all.begin + part.end};
  }

  NodeRounds& rounds_;
  const Reducing& job_;
  const DType dtype_;
  const size_t element_;
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
  if (leaves && bytes >= kLeastStreamed) {
    copy_stream(to, from, bytes);
  } else {
    std::memcpy(to, from, bytes);
  }
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
  LendTiming timing(rounds.reductions(), job.root < 0 ? bytes : 0, rounds.rank() == 0,
                    can_lend && rounds.session().all_read());
  const bool lends = can_lend && timing.lends() && rounds.places().lend(job.in, element);
  if (!published && !lends) chunks.copy_in(0);
  rounds.open(run, {0, 0, lends ? 1U : 0U, published ? 1U : 0U}, timing.arrive());
  timing.go_on(rounds.lend_next());
  const Exchanged shown = rounds.exchanged();
  if (shown.in_heap == all) return reduce_in_heap(rounds, run, job);
  rounds.places().forget();
  if (shown.lenders == all) {
    reduce_lent(rounds, run, job);
    return timing.end();
  }
  if (shown.in_heap + shown.lenders > 0) {
    // Some ranks have published where their data lies, but not all of them.
    chunks.copy_in(0);
    rounds.sync(run);
  }
  for (size_t k = 0; k <= chunks.count(); ++k) {
    if (k > 0) rounds.sync(run);
    if (k < chunks.count()) chunks.reduce_own(k);
    if (k > 0) chunks.copy_out(k - 1);
    if (k + 1 < chunks.count()) chunks.copy_in(k + 1);
  }
  timing.end();
}

}  // namespace ours::node
