#include <algorithm>

#include "collectives/tcp/tcp_algorithms.h"
#include "common/partition.h"

// Reductions of large arrays among few ranks, in which every rank talks to every other: a reduce-scatter and an
// all-gather (Rabenseifner 2004), both direct. Rank r gets slice r of all others' inputs, reduces it, and sends the
// result to all. Each rank sends 2 (P - 1) / P of the message, which is the minimum, like a ring, but without partial
// sums and their roundings. Slices travel in parts: while the last parts of the inputs are on their way, the first
// results are, too.
//
// Each element is reduced in the order of ranks, in one go: the bits are those of shared memory without domains,
// whatever the size of the message and wherever it is cut.
//
// Nothing is written before all ranks are known to have made the same call. Rank r writes a part of slice r only when
// all ranks' parts are here, with their headers. It writes a part of another slice only when the slice's reducer,
// which follows the same rule, has sent it.

namespace ours::tcp {

namespace {

constexpr uint16_t kInputs = 0;
constexpr uint16_t kResults = 1;
/// How many parts may have their inputs arriving at the same time: enough that none waits for the arithmetic,
constexpr size_t kWindow = 8;
/// but not more than this many bytes, so that they stay in the cache,
constexpr size_t kWindowBytes = 4 * 1024 * 1024;
/// and at least two.
constexpr size_t kLeastWindow = 2;

}  // namespace

void reduce_direct(TcpRun& run, const Slices& job) {
  const auto ranks = static_cast<size_t>(run.size);
  const auto me = static_cast<size_t>(run.rank);
  const size_t element = size_of(job.dtype);
  const size_t chunk = run.plan.chunk_bytes;
  const size_t own_bytes = job.counts[me] * element;
  const size_t own_parts = run.tcp.parts(own_bytes);
  const size_t window = std::clamp(kWindowBytes / (chunk * ranks), kLeastWindow, kWindow);
  const bool reads = std::find(job.readers.begin(), job.readers.end(), run.rank) != job.readers.end();

  // Memory for the parts of the others' inputs, then for the result if it only goes to others.
  std::byte* const memory =
      run.scratch.take(window * (ranks - 1) * chunk + (job.outputs[me] == nullptr ? own_bytes : 0));
  std::byte* const result = job.outputs[me] != nullptr ? job.outputs[me] : memory + window * (ranks - 1) * chunk;
  const auto place = [&](size_t part, size_t peer) {
    return memory + ((part % window) * (ranks - 1) + (peer < me ? peer : peer - 1)) * chunk;
  };

  Tally sent, received;
  std::vector<Tally> arrived(own_parts);
  size_t posted = 0, reduced = 0;
  const auto bytes_of = [&](size_t r) { return job.counts[r] * element; };

  // Each begins with the next rank, so that they do not all send to the same one at once.
  for (size_t i = 1; i < ranks; ++i) {
    const size_t to = (me + i) % ranks;
    run.tcp.send({static_cast<int>(to), kInputs, bytes_of(to)}, job.inputs[to], sent);
  }
  const auto post = [&] {
    for (; posted < own_parts && posted < reduced + window; ++posted) {
      for (size_t i = 1; i < ranks; ++i) {
        const size_t from = (me + i) % ranks;
        run.tcp.receive_part({static_cast<int>(from), kInputs, own_bytes}, posted, place(posted, from),
                             arrived[posted]);
      }
      if (posted + 1 < own_parts || !reads) continue;
      for (size_t i = 1; i < ranks; ++i) {
        const size_t from = (me + i) % ranks;
        run.tcp.receive({static_cast<int>(from), kResults, bytes_of(from)}, job.outputs[from], received);
      }
    }
  };
  std::vector<const void*> sources(ranks);
  const auto reduce_part = [&](size_t part) {
    const Slice bytes = piece_of(own_bytes, chunk, part);
    for (size_t r = 0; r < ranks; ++r) sources[r] = r == me ? job.inputs[me] + bytes.begin : place(part, r);
    if (!bytes.empty()) {
      ours::reduce(result + bytes.begin, sources.data(), run.size, bytes.size() / element, job.dtype, job.reduction);
    }
    for (const int reader : job.readers) {
      if (reader != run.rank) run.tcp.send_part({reader, kResults, own_bytes}, part, result + bytes.begin, sent);
    }
  };

  post();
  run.tcp.run([&] {
    while (reduced < own_parts && arrived[reduced].complete()) {
      reduce_part(reduced++);
      post();
    }
    return reduced == own_parts && sent.complete() && received.complete();
  });
}

}  // namespace ours::tcp
