#include <algorithm>

#include "collectives/partial_sums.h"
#include "collectives/tcp/tcp_algorithms.h"
#include "common/partition.h"

// Reductions among many ranks, in which every rank talks only to its two neighbours in a ring (Patarasuk and Yuan
// 2009, "Bandwidth optimal all-reduce algorithms for clusters of workstations"). With P ranks, the array is cut into
// P slices. In step t of the reduce-scatter, rank r sends slice r - 1 - t to rank r + 1, gets slice r - 2 - t from
// rank r - 1 and adds its own input to it; after P - 1 steps it holds all of slice r. In step t of the all-gather it
// sends slice r - t on and gets slice r - 1 - t. Each rank sends 2 (P - 1) / P of the array.
//
// Slices travel in parts, each of which is sent on as soon as it is reduced: receiving, reducing and sending overlap.
//
// Slice s is reduced in the order of ranks s + 1, s + 2, ..., s, wrapping around. All ranks and runs get the same
// bits, but elements of different slices are added in different orders, so the bits depend on the size of the array.
// Partial sums travel in the type of the call: a half type is rounded P - 1 times, which costs at most (P - 1) / 2
// units in the last place of the largest partial sum.
//
// Nothing is written before all ranks are known to have made the same call: a reduced slice has passed through all of
// them, and each has compared its predecessor's headers.

namespace ours::tcp {

namespace {

/// One part of the incoming data: its step, and its number in that step's slice.
struct Cursor {
  size_t step = 0;
  size_t part = 0;
};

}  // namespace

void reduce_ring(TcpRun& run, const Slices& job) {
  const auto ranks = static_cast<size_t>(run.size);
  const auto me = static_cast<size_t>(run.rank);
  const size_t element = size_of(job.dtype);
  const size_t chunk = run.plan.chunk_bytes;
  const auto bytes_of = [&](size_t slice) { return job.counts[slice] * element; };
  if (ranks == 1) {
    const void* const only = job.inputs[0];
    if (job.counts[0] != 0) ours::reduce(job.outputs[0], &only, 1, job.counts[0], job.dtype, job.reduction);
    return;
  }
  const int next = static_cast<int>((me + 1) % ranks);
  const int before = static_cast<int>((me + ranks - 1) % ranks);
  const size_t gathering = job.outputs[next] == nullptr ? 0 : ranks - 1;  // steps of the all-gather
  const size_t steps = ranks - 1 + gathering;
  // The slice sent in a step: partial sums go around once, and then the results. What is received is sent next.
  const auto slice_at = [&](size_t step) { return (me + 2 * ranks - 1 - step) % ranks; };
  const auto slice_from = [&](size_t step) { return slice_at(step + 1); };

  // PREMUL_SUM multiplies each input once, before anything is added.
  std::vector<const std::byte*> inputs = job.inputs;
  if (job.reduction.kind == ReduceKind::PremulSum) {
    size_t total = 0;
    for (size_t s = 0; s < ranks; ++s) total += bytes_of(s);
    std::byte* const scaled = run.tcp.keep(total);
    size_t at = 0;
    for (size_t s = 0; s < ranks; at += bytes_of(s), ++s) {
      const void* const input = job.inputs[s];
      inputs[s] = scaled + at;
      if (job.counts[s] != 0) ours::reduce(scaled + at, &input, 1, job.counts[s], job.dtype, job.reduction);
    }
  }

  // Partial sums of a step lie in one of two buffers, and are sent from there in the next step.
  const size_t longest = *std::max_element(job.counts.begin(), job.counts.end()) * element;
  std::byte* const sums = run.scratch.take(2 * longest + 2 * chunk);
  const auto buffer = [&](size_t step) { return sums + (step % 2) * (longest + chunk); };

  std::vector<std::vector<Tally>> arrived(steps), sent(steps);
  for (size_t t = 0; t < steps; ++t) {
    arrived[t].resize(run.tcp.parts(bytes_of(slice_from(t))));
    sent[t].resize(run.tcp.parts(bytes_of(slice_at(t))));
  }
  const auto send = [&](size_t step, size_t part, const std::byte* data) {
    run.tcp.send_part({next, static_cast<uint16_t>(step), bytes_of(slice_at(step))}, part, data, sent[step][part]);
  };

  Cursor posted, done;
  const auto post = [&] {
    while (posted.step < steps) {
      const size_t step = posted.step;
      const size_t part = posted.part;
      const size_t slice = slice_from(step);
      std::byte* to = nullptr;
      if (step < ranks - 1) {
        // A buffer is free once the part that lay there two steps ago has been sent on.
        const bool free = step < 2 || part >= sent[step - 1].size() || sent[step - 1][part].done == 1;
        if (!free) return;
        to = buffer(step) + part * chunk;
      } else {
        to = job.outputs[slice] + part * chunk;
      }
      run.tcp.receive_part({before, static_cast<uint16_t>(step), bytes_of(slice)}, part, to, arrived[step][part]);
      if (++posted.part < arrived[step].size()) continue;
      posted = {step + 1, 0};
    }
  };
  const auto take = [&](size_t step, size_t part) {
    const size_t slice = slice_from(step);
    const Slice bytes = piece_of(bytes_of(slice), chunk, part);
    const std::byte* result = nullptr;
    if (step < ranks - 1) {
      const bool final = step == ranks - 2;
      std::byte* const sum = buffer(step) + part * chunk;
      std::byte* const to = final ? job.outputs[slice] + bytes.begin : sum;
      const void* const sources[2] = {sum, inputs[slice] + bytes.begin};
      if (!bytes.empty()) {
        ours::reduce(to, sources, 2, bytes.size() / element, job.dtype,
                     final ? between_nodes(job.reduction, job.dtype) : plain(job.reduction));
      }
      result = to;
    } else {
      result = job.outputs[slice] + bytes.begin;
    }
    if (step + 1 < steps) send(step + 1, part, result);
  };

  for (size_t part = 0; part < sent[0].size(); ++part) send(0, part, inputs[slice_at(0)] + part * chunk);
  post();
  run.tcp.run([&] {
    while (done.step < steps && arrived[done.step][done.part].done == 1) {
      take(done.step, done.part);
      if (++done.part < arrived[done.step].size()) continue;
      done = {done.step + 1, 0};
    }
    post();
    if (done.step < steps) return false;
    return std::all_of(sent.begin(), sent.end(), [](const std::vector<Tally>& step) {
      return std::all_of(step.begin(), step.end(), [](const Tally& part) { return part.complete(); });
    });
  });
}

}  // namespace ours::tcp
