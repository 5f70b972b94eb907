#include <cstring>

#include "collectives/partial_sums.h"
#include "collectives/short_reductions.h"
#include "collectives/tcp/tcp_algorithms.h"
#include "common/partition.h"

// The table of algorithms (select.h) says which algorithm reduces what: among few ranks, every rank talks to every
// other (tcp_reduce_direct.cpp); among many, small messages are reduced by recursive doubling (short_reductions.h) and
// large ones around a ring.
//
// Data that lies in several places is packed into one before, and unpacked afterwards.

namespace ours::tcp {

namespace {

/// `count` elements at `in`; `out` is null where the result is not wanted.
struct Array {
  DType dtype;
  const Reduction& reduction;
  const std::byte* in;
  std::byte* out;
  size_t count;

  size_t bytes() const { return count * size_of(dtype); }
};

Algorithm choose(const TcpRun& run, const Selection& selection, Selectable operation, size_t bytes) {
  // Every rank has a node of its own.
  return selection.choose({operation, run.size, 1, bytes});
}

void reduce_doubling(TcpRun& run, const Array& array) {
  const size_t bytes = array.bytes();
  std::byte* const mine = run.scratch.take(2 * bytes);
  if (bytes != 0) std::memcpy(mine, array.in, bytes);
  reduce_by_doubling(run.members(), {array.count, array.dtype, array.reduction}, mine, mine + bytes);
  if (bytes != 0 && array.out != nullptr) std::memcpy(array.out, mine, bytes);
}

void reduce_whole(TcpRun& run, const Array& array) {
  const size_t bytes = array.bytes();
  std::byte* const all = run.scratch.take(run.all.size() * bytes);
  // Sent from a copy, since the result may overwrite the input before all of it is sent.
  if (bytes != 0) std::memcpy(all + static_cast<size_t>(run.rank) * bytes, array.in, bytes);
  ours::reduce_whole(run.members(), {array.count, array.dtype, array.reduction}, all, array.out);
}

Slices slices_of(const TcpRun& run, const Array& array, int root) {
  constexpr size_t kAlign = 64;
  const size_t element = size_of(array.dtype);
  Slices slices{array.dtype, array.reduction, {}, {}, {}, root < 0 ? run.all : std::vector<int>{root}};
  for (int r = 0; r < run.size; ++r) {
    const Slice slice = slice_of(array.count, run.size, r, kAlign / element);
    slices.inputs.push_back(array.in + slice.begin * element);
    slices.counts.push_back(slice.size());
    slices.outputs.push_back(array.out == nullptr ? nullptr : array.out + slice.begin * element);
  }
  return slices;
}

void reduce_array(TcpRun& run, const Selection& selection, const Array& array, int root) {
  const Selectable operation = root < 0 ? Selectable::AllReduce : Selectable::Reduce;
  const Reduction in_steps = within_range(array.reduction, array.dtype);
  Array stepped{array.dtype, in_steps, array.in, array.out, array.count};
  switch (choose(run, selection, operation, array.bytes())) {
    case Algorithm::Whole:
      return reduce_whole(run, array);
    case Algorithm::Doubling:
      return reduce_doubling(run, stepped);
    case Algorithm::Direct:
      return reduce_direct(run, slices_of(run, array, root));
    case Algorithm::Ring:
      // A ring gives every rank the whole result; the ranks that do not want it drop it.
      if (stepped.out == nullptr) stepped.out = run.tcp.keep(array.bytes());
      return reduce_ring(run, slices_of(run, stepped, root));
  }
}

}  // namespace

void reduce(TcpRun& run, const Selection& selection, const Reducing& job) {
  const DType dtype = run.running.call.dtype;
  const size_t element = size_of(dtype);
  const size_t count = job.in.count();
  if (count == 0 || job.in.whole() != nullptr) {
    std::byte* const to = job.out == nullptr ? nullptr : job.out->whole();
    return reduce_array(run, selection, {dtype, job.reduction, job.in.whole(), to, count}, job.root);
  }
  // Kept until all sends from it and receives into it have ended, however the call ends.
  std::byte* const packed = run.tcp.keep(count * element);
  job.in.copy_out(0, count, packed);
  std::byte* const to = job.out == nullptr ? nullptr : packed;
  reduce_array(run, selection, {dtype, job.reduction, packed, to, count}, job.root);
  if (job.out != nullptr) job.out->copy_in(0, count, packed);
}

void reduce_scatter(TcpRun& run, const Selection& selection, const Scattering& job) {
  const DType dtype = run.running.call.dtype;
  Slices slices{dtype, job.reduction, {}, job.counts, std::vector<std::byte*>(job.counts.size()), {}};
  for (const void* input : job.inputs) slices.inputs.push_back(static_cast<const std::byte*>(input));
  slices.outputs[static_cast<size_t>(run.rank)] = static_cast<std::byte*>(job.out);
  const size_t bytes = run.running.record.count * size_of(dtype);
  if (choose(run, selection, Selectable::ReduceScatter, bytes) != Algorithm::Ring) return reduce_direct(run, slices);
  slices.reduction = within_range(job.reduction, dtype);
  reduce_ring(run, slices);
}

}  // namespace ours::tcp
