#include <cstring>

#include "collectives/node_group_impl.h"
#include "common/partition.h"

// all_reduce and reduce in shared memory.
//
// Small messages: every rank writes its input into its stage, one synchronisation, every rank reduces all stages for
// itself. P times the arithmetic of a divided reduction, but half its synchronisations, which is what counts here.
//
// Large messages go in chunks through a pipeline of three steps that share one round, so that n chunks cost n + 1
// synchronisations. In round k a rank reduces its slice of chunk k (read from the stages), copies the reduced chunk k -
// 1 out of the ranks' results, and copies chunk k + 1 into its stage. This is reduce-scatter followed by all-gather
// (Rabenseifner 2004), with shared memory in the place of messages; stages and results stay in the cache. A rank's own
// slice is read where it lies and never staged.
//
// Each element is reduced in the order of ranks whatever the size of message and chunk, so the bits are always the
// same.

namespace ours {

namespace {

constexpr size_t kInlineRanks = 16;

/// Sources of one reduction, without an allocation for usual numbers of ranks.
class Sources {
 public:
  explicit Sources(int ranks) : many_(ranks > static_cast<int>(kInlineRanks) ? static_cast<size_t>(ranks) : 0) {}
  const void** data() { return many_.empty() ? few_ : many_.data(); }

 private:
  const void* few_[kInlineRanks] = {};
  std::vector<const void*> many_;
};

/// Results beyond this size leave the cache before anyone reads them: write them around it.
constexpr size_t kStreamBytes = 4 * 1024 * 1024;

}  // namespace

void NodeGroup::all_reduce(const Call& call, const void* in, void* out, size_t count, const Reduction& reduction) {
  check_supported(reduction.kind, call.dtype);
  guarded([&] { reduce_to(call, record_of(call, count, reduction, -1), in, out, count, reduction); });
}

void NodeGroup::reduce(const Call& call, const void* in, void* out, size_t count, const Reduction& reduction,
                       int root) {
  check_supported(reduction.kind, call.dtype);
  check_root(root);
  guarded([&] {
    reduce_to(call, record_of(call, count, reduction, root), in, rank() == root ? out : nullptr, count, reduction);
  });
}

void NodeGroup::reduce_to(const Call& call, const CallRecord& record, const void* in, void* out, size_t count,
                          const Reduction& reduction) {
  const size_t bytes = count * size_of(call.dtype);
  if (bytes <= session_->header().small_bytes) {
    reduce_small(call, record, in, out, count, reduction);
  } else {
    reduce_chunked(call, record, in, out, count, reduction);
  }
}

void NodeGroup::reduce_small(const Call& call, const CallRecord& record, const void* in, void* out, size_t count,
                             const Reduction& reduction) {
  reserve_stage();
  const size_t bytes = count * size_of(call.dtype);
  if (bytes >= WriteTimes::kTimedBytes) write_.begin();
  write_.copy(stage(rank(), barrier_.next_parity()), in, bytes);
  publish_record(record);
  sync(call, record);
  check_records(record);
  if (out == nullptr || count == 0) return;
  Sources sources(size());
  for (int r = 0; r < size(); ++r) sources.data()[r] = stage(r, barrier_.parity());
  ours::reduce(out, sources.data(), size(), count, call.dtype, reduction);
}

void NodeGroup::reduce_chunked(const Call& call, const CallRecord& record, const void* in, void* out, size_t count,
                               const Reduction& reduction) {
  reserve_stage();
  const size_t element = size_of(call.dtype);
  write_.begin();
  pages_.saw(in, count * element);
  if (out != in && out != nullptr) pages_.saw(out, count * element);
  const size_t per_chunk = session_->layout().chunk_bytes / element;
  const size_t chunks = piece_count(count, per_chunk);
  const size_t align = kCacheLine / element;
  const auto* source = static_cast<const std::byte*>(in);
  auto* target = static_cast<std::byte*>(out);
  const bool stream = count * element >= kStreamBytes;
  const auto slice = [&](const Slice& chunk, int r) { return slice_of(chunk.size(), size(), r, align); };

  const auto copy_in = [&](size_t k) {
    const Slice chunk = piece_of(count, per_chunk, k);
    const Slice own = slice(chunk, rank());
    std::byte* to = stage(rank(), barrier_.next_parity());
    const std::byte* from = source + chunk.begin * element;
    write_.copy(to, from, own.begin * element);
    write_.copy(to + own.end * element, from + own.end * element, (chunk.size() - own.end) * element);
  };

  Sources sources(size());
  const auto reduce_own = [&](size_t k) {
    const Slice chunk = piece_of(count, per_chunk, k);
    const Slice own = slice(chunk, rank());
    for (int r = 0; r < size(); ++r) sources.data()[r] = stage(r, barrier_.parity()) + own.begin * element;
    sources.data()[rank()] = source + (chunk.begin + own.begin) * element;
    ours::reduce(result(rank(), barrier_.next_parity()), sources.data(), size(), own.size(), call.dtype, reduction,
                 write_.around());
  };

  const auto copy_out = [&](size_t k) {
    const Slice chunk = piece_of(count, per_chunk, k);
    for (int r = 0; r < size(); ++r) {
      const Slice part = slice(chunk, r);
      std::byte* to = target + (chunk.begin + part.begin) * element;
      const std::byte* from = result(r, barrier_.parity());
      if (stream) {
        copy_stream(to, from, part.size() * element);
      } else {
        std::memcpy(to, from, part.size() * element);
      }
    }
  };

  copy_in(0);
  publish_record(record);
  sync(call, record);
  check_records(record);
  for (size_t k = 0; k <= chunks; ++k) {
    if (k > 0) sync(call, record);
    if (k < chunks) reduce_own(k);
    if (k > 0 && target != nullptr) copy_out(k - 1);
    if (k + 1 < chunks) copy_in(k + 1);
  }
}

}  // namespace ours
