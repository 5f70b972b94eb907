#include <algorithm>
#include <cstring>
#include <numeric>

#include "collectives/doubling.h"
#include "collectives/partial_sums.h"
#include "collectives/tcp/tcp_group_impl.h"

// Which algorithm reduces what is for the table of algorithms to say (select.h): among few ranks, every rank talks to
// every other (tcp_reduce_direct.cpp); among many, small messages are reduced by recursive doubling (doubling.h) and
// large ones around a ring.
//
// Messages that lie in several places are packed into one before, and unpacked after.

namespace ours {

void TcpGroup::all_reduce(const Call& call, const void* in, void* out, size_t count, const Reduction& reduction) {
  check_supported(reduction.kind, call.dtype);
  const size_t element = size_of(call.dtype);
  const Pieces to(out, count, element);
  const Pieces from(const_cast<void*>(in), count, element);
  guarded([&] { reduce_to(call, record_of(call, count, reduction, -1), from, &to, reduction, -1); });
}

void TcpGroup::all_reduce(const Call& call, const std::vector<Span>& pieces, const Reduction& reduction) {
  check_supported(reduction.kind, call.dtype);
  const Pieces data(pieces, size_of(call.dtype));
  guarded([&] { reduce_to(call, record_of(call, data.count(), reduction, -1), data, &data, reduction, -1); });
}

void TcpGroup::reduce(const Call& call, const void* in, void* out, size_t count, const Reduction& reduction, int root) {
  check_supported(reduction.kind, call.dtype);
  check_root(root, size());
  const size_t element = size_of(call.dtype);
  const Pieces to(out, count, element);
  const Pieces from(const_cast<void*>(in), count, element);
  guarded([&] {
    reduce_to(call, record_of(call, count, reduction, root), from, rank() == root ? &to : nullptr, reduction, root);
  });
}

void TcpGroup::reduce_to(const Call& call, const CallRecord& record, const Pieces& in, const Pieces* out,
                         const Reduction& reduction, int root) {
  const size_t element = size_of(call.dtype);
  const bool packs = in.whole() == nullptr && in.count() > 0;
  std::vector<std::byte> packed(packs ? in.count() * element : 0);
  in.visit(0, packs ? in.count() : 0,
           [&](std::byte* data, size_t at, size_t n) { std::memcpy(&packed[at * element], data, n * element); });
  const std::byte* from = packs ? packed.data() : in.whole();
  std::byte* to = out == nullptr ? nullptr : packs ? packed.data() : out->whole();
  {
    TcpCall tcp(*mesh_, facts_of(call, record));
    reduce_array(tcp, call.dtype, reduction, from, to, in.count(), root);
  }
  if (!packs || out == nullptr) return;
  out->visit(0, out->count(),
             [&](std::byte* data, size_t at, size_t n) { std::memcpy(data, &packed[at * element], n * element); });
}

void TcpGroup::reduce_array(TcpCall& tcp, DType dtype, const Reduction& reduction, const std::byte* in, std::byte* out,
                            size_t count, int root) {
  constexpr size_t kAlign = 64;
  const size_t element = size_of(dtype);
  const Algorithm chosen = choose(root < 0 ? Selectable::AllReduce : Selectable::Reduce, count * element);
  if (chosen == Algorithm::Whole) return reduce_whole(tcp, dtype, reduction, in, out, count);
  const Reduction in_steps = within_range(reduction, dtype);
  if (chosen == Algorithm::Doubling) return reduce_doubling(tcp, dtype, in_steps, in, out, count);

  // Around a ring every rank gets the whole result; those that do not want it drop it.
  const bool ring = chosen == Algorithm::Ring;
  if (ring && out == nullptr) out = tcp.keep(count * element);

  Reducing job{dtype, ring ? in_steps : reduction, {}, {}, {}, {}};
  for (int r = 0; r < size(); ++r) {
    const Slice slice = slice_of(count, size(), r, kAlign / element);
    job.inputs.push_back(in + slice.begin * element);
    job.counts.push_back(slice.size());
    job.outputs.push_back(out == nullptr ? nullptr : out + slice.begin * element);
  }
  if (ring) return reduce_ring(tcp, job);
  if (root >= 0) {
    job.readers = {root};
  } else {
    job.readers.resize(static_cast<size_t>(size()));
    std::iota(job.readers.begin(), job.readers.end(), 0);
  }
  reduce_direct(tcp, job);
}

void TcpGroup::reduce_doubling(TcpCall& tcp, DType dtype, const Reduction& reduction, const std::byte* in,
                               std::byte* out, size_t count) {
  const size_t bytes = count * size_of(dtype);
  std::byte* const mine = scratch(2 * bytes);
  if (bytes != 0) std::memcpy(mine, in, bytes);
  std::vector<int> all(static_cast<size_t>(size()));
  std::iota(all.begin(), all.end(), 0);
  Doubling(tcp, all, rank())
      .reduce(mine, mine + bytes, count, dtype, reduction, [&](const std::function<bool()>& done) { tcp.run(done); });
  if (bytes != 0 && out != nullptr) std::memcpy(out, mine, bytes);
}

void TcpGroup::reduce_scatter(const Call& call, const std::vector<const void*>& inputs,
                              const std::vector<size_t>& counts, void* out, const Reduction& reduction) {
  check_supported(reduction.kind, call.dtype);
  const auto ranks = static_cast<size_t>(size());
  check_reduce_scatter(inputs, counts, size());
  guarded([&] {
    // The sizes of all parts must agree, not only their sum.
    const size_t sum = std::accumulate(counts.begin(), counts.end(), size_t{0});
    TcpCall tcp(*mesh_, facts_of(call, record_of(call, sum, reduction, -1), fingerprint_of(counts)));
    Reducing job{call.dtype, reduction, {}, counts, std::vector<std::byte*>(ranks), {}};
    for (const void* input : inputs) job.inputs.push_back(static_cast<const std::byte*>(input));
    job.outputs[static_cast<size_t>(rank())] = static_cast<std::byte*>(out);
    if (choose(Selectable::ReduceScatter, sum * size_of(call.dtype)) == Algorithm::Ring) {
      job.reduction = within_range(reduction, call.dtype);
      reduce_ring(tcp, job);
    } else {
      reduce_direct(tcp, job);
    }
  });
}

}  // namespace ours
