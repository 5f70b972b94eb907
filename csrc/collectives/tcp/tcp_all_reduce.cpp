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

void TcpGroup::do_reduce(const Running& run, const Reducing& job) {
  const size_t element = size_of(run.call.dtype);
  const Pieces& in = job.in;
  const bool packs = in.whole() == nullptr && in.count() > 0;
  std::vector<std::byte> packed(packs ? in.count() * element : 0);
  in.visit(0, packs ? in.count() : 0,
           [&](std::byte* data, size_t at, size_t n) { std::memcpy(&packed[at * element], data, n * element); });
  const std::byte* from = packs ? packed.data() : in.whole();
  std::byte* to = job.out == nullptr ? nullptr : packs ? packed.data() : job.out->whole();
  {
    TcpCall tcp(*mesh_, facts_of(*mesh_, run));
    reduce_array(tcp, run.call.dtype, job.reduction, from, to, in.count(), job.root);
  }
  if (!packs || job.out == nullptr) return;
  job.out->visit(0, job.out->count(),
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

  Slices job{dtype, ring ? in_steps : reduction, {}, {}, {}, {}};
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

void TcpGroup::do_reduce_scatter(const Running& run, const Scattering& asked) {
  const DType dtype = run.call.dtype;
  TcpCall tcp(*mesh_, facts_of(*mesh_, run));
  Slices job{dtype, asked.reduction, {}, asked.counts, std::vector<std::byte*>(static_cast<size_t>(size())), {}};
  for (const void* input : asked.inputs) job.inputs.push_back(static_cast<const std::byte*>(input));
  job.outputs[static_cast<size_t>(rank())] = static_cast<std::byte*>(asked.out);
  if (choose(Selectable::ReduceScatter, run.record.count * size_of(dtype)) == Algorithm::Ring) {
    job.reduction = within_range(asked.reduction, dtype);
    reduce_ring(tcp, job);
  } else {
    reduce_direct(tcp, job);
  }
}

}  // namespace ours
