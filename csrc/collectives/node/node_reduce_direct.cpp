#include <cstring>

#include "collectives/node/node_algorithms.h"
#include "common/partition.h"

// all_reduce and reduce of large arrays, in chunks through a pipeline of three steps that share one round, so that n
// chunks cost n + 1 synchronisations. In round k a rank reduces its slice of chunk k (read from the stages), copies
// the reduced chunk k - 1 out of the ranks' results, and copies chunk k + 1 into its stage. This is a reduce-scatter
// followed by an all-gather (Rabenseifner 2004), with shared memory in place of messages; stages and results stay in
// the cache. A rank's own slice is read where it lies and never staged.
//
// Arrays that lie in the heap on all ranks need no stages (node_reduce_in_heap.cpp); the first synchronisation shows
// whether they do.
//
// Each element is reduced in the order of ranks whatever the size of array and chunk, so the bits are always the
// same.

namespace ours::node {

namespace {

/// The steps of the pipeline, each for one chunk k.
class Chunks {
 public:
  Chunks(NodeRounds& rounds, const Reducing& job, DType dtype)
      : rounds_(rounds),
        job_(job),
        dtype_(dtype),
        element_(size_of(dtype)),
        per_chunk_(rounds.chunk_bytes() / element_),
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
        copy_result(data, from + at * element_, n * element_, job_.in.count() * element_);
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
  Sources sources_;
};

}  // namespace

void copy_result(void* to, const void* from, size_t bytes, size_t total) {
  constexpr size_t kStreamed = size_t{4} << 20;
  constexpr size_t kLeastStreamed = 4096;
  if (total >= kStreamed && bytes >= kLeastStreamed) {
    copy_stream(to, from, bytes);
  } else {
    std::memcpy(to, from, bytes);
  }
}

void reduce_direct(NodeRounds& rounds, const Running& run, const Reducing& job) {
  const size_t element = size_of(run.call.dtype);
  rounds.note_use(job.in, element);
  if (job.out != nullptr && job.out != &job.in) rounds.note_use(*job.out, element);
  rounds.write().begin();

  Chunks chunks(rounds, job, run.call.dtype);
  const bool published = job.out == &job.in && rounds.places().publish(job.in, element);
  if (!published) chunks.copy_in(0);
  rounds.open(run, {0, 0, published ? uint64_t{1} : 0});
  const uint64_t in_heap = rounds.exchanged().lenders;
  if (in_heap == static_cast<uint64_t>(rounds.size())) return reduce_in_heap(rounds, run, job);
  rounds.places().forget();
  if (in_heap > 0) {
    // Some ranks' data lies in the heap, but not all ranks'.
    chunks.copy_in(0);
    rounds.sync(run);
  }
  for (size_t k = 0; k <= chunks.count(); ++k) {
    if (k > 0) rounds.sync(run);
    if (k < chunks.count()) chunks.reduce_own(k);
    if (k > 0) chunks.copy_out(k - 1);
    if (k + 1 < chunks.count()) chunks.copy_in(k + 1);
  }
}

}  // namespace ours::node
