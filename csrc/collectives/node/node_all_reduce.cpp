#include <cstring>

#include "collectives/node/node_group_impl.h"
#include "common/partition.h"

// all_reduce and reduce in shared memory.
//
// Small messages: every rank writes its input into its stage, one synchronisation, every rank reduces all stages for
// itself. P times the arithmetic of a divided reduction, but half its synchronisations, which is what counts here. The
// smallest do without the stage: they lie beside the counter that the synchronisation polls.
//
// Large messages go in chunks through a pipeline of three steps that share one round, so that n chunks cost n + 1
// synchronisations. In round k a rank reduces its slice of chunk k (read from the stages), copies the reduced chunk k -
// 1 out of the ranks' results, and copies chunk k + 1 into its stage. This is reduce-scatter followed by all-gather
// (Rabenseifner 2004), with shared memory in the place of messages; stages and results stay in the cache. A rank's own
// slice is read where it lies and never staged.
//
// Large messages that lie in the heap on all ranks need no stages: see node_heap_reduce.cpp.
//
// Each element is reduced in the order of ranks whatever the size of message and chunk, so the bits are always the
// same.

namespace ours {

namespace {

/// Results beyond this size leave the cache before anyone reads them.
constexpr size_t kStreamBytes = 4 * 1024 * 1024;

/// Copies what leaves the cache before anyone reads it: around the cache, unless it is so short that the fence after
/// that would cost more.
void* copy_away(void* to, const void* from, size_t bytes) {
  constexpr size_t kLeastBytes = 4096;
  if (bytes < kLeastBytes) return std::memcpy(to, from, bytes);
  copy_stream(to, from, bytes);
  return to;
}

/// Moves every pointer by `bytes`.
void advance(const void** pointers, int count, size_t bytes) {
  for (int i = 0; i < count; ++i) pointers[i] = static_cast<const std::byte*>(pointers[i]) + bytes;
}

}  // namespace

void NodeGroup::do_reduce(const Running& run, const Reducing& job) {
  reduce_to(run.call, run.record, job.in, job.out, job.reduction);
}

void NodeGroup::reduce_to(const Call& call, const CallRecord& record, const Pieces& in, const Pieces* out,
                          const Reduction& reduction) {
  reserve_stage();
  if (in.count() * size_of(call.dtype) <= session_->header().small_bytes) {
    reduce_small(call, record, in, out, reduction);
  } else {
    reduce_chunked(call, record, in, out, reduction);
  }
}

void NodeGroup::reduce_small(const Call& call, const CallRecord& record, const Pieces& in, const Pieces* out,
                             const Reduction& reduction) {
  const size_t element = size_of(call.dtype);
  const size_t bytes = in.count() * element;
  // What fits is read along with the arrival itself.
  const bool rides = bytes <= sizeof(Arrival::data);
  const auto shown = [&](int r, size_t parity) {
    return rides ? session_->block(r).arrival[parity].data : stage(r, parity);
  };
  std::byte* const to = shown(rank(), barrier_.next_parity());
  if (bytes >= WriteTimes::kTimedBytes) write_.begin();
  in.visit(0, in.count(),
           [&](std::byte* data, size_t at, size_t n) { write_.copy(to + at * element, data, n * element); });
  publish_record(record);
  sync(call, record);
  check_records(record);
  if (out == nullptr) return;
  Sources sources(size());
  for (int r = 0; r < size(); ++r) sources.data()[r] = shown(r, barrier_.parity());
  out->visit(0, out->count(), [&](std::byte* data, size_t, size_t n) {
    ours::reduce(data, sources.data(), size(), n, call.dtype, reduction);
    advance(sources.data(), size(), n * element);
  });
}

void NodeGroup::reduce_chunked(const Call& call, const CallRecord& record, const Pieces& in, const Pieces* out,
                               const Reduction& reduction) {
  const size_t element = size_of(call.dtype);
  const size_t count = in.count();
  const size_t per_chunk = session_->layout().chunk_bytes / element;
  const size_t chunks = piece_count(count, per_chunk);
  const size_t align = kCacheLine / element;
  const bool stream = count * element >= kStreamBytes;
  const auto slice = [&](const Slice& chunk, int r) { return slice_of(chunk.size(), size(), r, align); };
  const auto saw = [&](std::byte* data, size_t, size_t n) { saw_buffer(data, n * element); };
  in.visit(0, count, saw);
  if (out != nullptr && out != &in) out->visit(0, count, saw);
  write_.begin();

  const auto copy_in = [&](size_t k) {
    const Slice chunk = piece_of(count, per_chunk, k);
    const Slice own = slice(chunk, rank());
    std::byte* const stage = this->stage(rank(), barrier_.next_parity());
    for (const Slice& part : {Slice{0, own.begin}, Slice{own.end, chunk.size()}}) {
      std::byte* const to = stage + part.begin * element;
      in.visit(chunk.begin + part.begin, chunk.begin + part.end,
               [&](std::byte* data, size_t at, size_t n) { write_.copy(to + at * element, data, n * element); });
    }
  };

  Sources sources(size());
  const auto reduce_own = [&](size_t k) {
    const Slice chunk = piece_of(count, per_chunk, k);
    const Slice own = slice(chunk, rank());
    std::byte* const to = result(rank(), barrier_.next_parity());
    in.visit(chunk.begin + own.begin, chunk.begin + own.end, [&](std::byte* data, size_t at, size_t n) {
      for (int r = 0; r < size(); ++r) sources.data()[r] = stage(r, barrier_.parity()) + (own.begin + at) * element;
      sources.data()[rank()] = data;
      ours::reduce(to + at * element, sources.data(), size(), n, call.dtype, reduction, write_.around());
    });
  };

  const auto copy_out = [&](size_t k) {
    const Slice chunk = piece_of(count, per_chunk, k);
    for (int r = 0; r < size(); ++r) {
      const Slice part = slice(chunk, r);
      const std::byte* const from = result(r, barrier_.parity());
      out->visit(chunk.begin + part.begin, chunk.begin + part.end, [&](std::byte* data, size_t at, size_t n) {
        (stream ? copy_away : std::memcpy)(data, from + at * element, n * element);
      });
    }
  };

  // Ranks whose data is in the heap have nothing to stage if that is so for all.
  const bool in_place = out == &in && publish_places(in, element);
  if (!in_place) {
    session_->self().heap_parts[barrier_.next_parity()] = 0;
    copy_in(0);
  }
  publish_record(record);
  sync(call, record);
  check_records(record);
  const int in_heap = ranks_in_heap();
  if (in_heap == size()) return reduce_in_heap(call, record, in, reduction);
  exposed_.reset();  // nobody writes to places that only some have
  if (in_heap > 0) {
    copy_in(0);
    sync(call, record);
  }
  for (size_t k = 0; k <= chunks; ++k) {
    if (k > 0) sync(call, record);
    if (k < chunks) reduce_own(k);
    if (k > 0 && out != nullptr) copy_out(k - 1);
    if (k + 1 < chunks) copy_in(k + 1);
  }
}

}  // namespace ours
