#include <algorithm>
#include <cstring>

#include "collectives/tcp/dissemination.h"
#include "collectives/tcp/tcp_algorithms.h"

// all_gather among many ranks, around a ring like that of tcp_reduce_ring.cpp: in step t, rank r gets the block of
// rank r - 1 - t from rank r - 1, and sends it on in the next step. Before that, each rank compares the sizes it
// expects with its neighbour's, and then all confirm that they agree.

namespace ours::tcp {

namespace {

/// The phase of the tables of sizes; those of blocks are small numbers.
constexpr uint16_t kSizes = UINT16_MAX;

}  // namespace

void all_gather(TcpRun& run, const ExchangePlan& plan) {
  const auto ranks = static_cast<size_t>(run.size);
  const auto me = static_cast<size_t>(run.rank);
  const int next = static_cast<int>((me + 1) % ranks);
  const int before = static_cast<int>((me + ranks - 1) % ranks);
  const size_t chunk = run.plan.chunk_bytes;

  // If any two ranks expect different sizes, so do two neighbours.
  std::vector<uint64_t> sizes, theirs(ranks);
  for (size_t r = 0; r < ranks; ++r) sizes.push_back(plan.received(r));
  if (ranks > 1) {
    const size_t bytes = ranks * sizeof(uint64_t);
    size_t told = 0, heard = 0;
    std::byte* const outgoing = run.tcp.keep(bytes);
    std::byte* const incoming = run.tcp.keep(bytes);
    std::memcpy(outgoing, sizes.data(), bytes);
    run.tcp.send({next, kSizes, bytes}, outgoing, &told);
    run.tcp.receive({before, kSizes, bytes}, incoming, &heard);
    run.tcp.run([&] { return told == run.tcp.parts(bytes) && heard == told; });
    std::memcpy(theirs.data(), incoming, bytes);
  } else {
    theirs = sizes;
  }
  const auto differs = std::mismatch(sizes.begin(), sizes.end(), theirs.begin());
  if (differs.first != sizes.end()) {
    run.tcp.mismatch(run.tcp.describe(run.rank) + " expects " + std::to_string(*differs.first) + " bytes from " +
                     run.tcp.describe(static_cast<int>(differs.first - sizes.begin())) + ", " +
                     run.tcp.describe(before) + " expects " + std::to_string(*differs.second) + " bytes, in " +
                     describe_record(run.running.record) + ". Make the sizes of the tensors agree on all ranks");
  }
  Dissemination all(run.tcp, run.rank, run.size);

  const size_t steps = ranks - 1;
  const auto block_of = [&](size_t step) { return (me + ranks - 1 - step) % ranks; };
  size_t sent = 0, to_send = 0;
  if (steps > 0) {
    run.tcp.send({next, 0, plan.sent(me)}, plan.sends[me]->data, &sent);
    to_send = run.tcp.parts(plan.sent(me));
  }
  run.tcp.run([&] { return all.advance(); });
  std::vector<std::vector<size_t>> arrived(steps);
  for (size_t step = 0; step < steps; ++step) {
    const Span block = *plan.receives[block_of(step)];
    arrived[step].assign(run.tcp.parts(block.bytes), 0);
    for (size_t part = 0; part < arrived[step].size(); ++part) {
      run.tcp.receive_part({before, static_cast<uint16_t>(step), block.bytes}, part,
                           static_cast<std::byte*>(block.data) + part * chunk, &arrived[step][part]);
    }
  }
  size_t step = 0, part = 0;
  run.tcp.run([&] {
    while (step < steps && arrived[step][part] == 1) {
      const Span block = *plan.receives[block_of(step)];
      if (step + 1 < steps) {
        run.tcp.send_part({next, static_cast<uint16_t>(step + 1), block.bytes}, part,
                          static_cast<std::byte*>(block.data) + part * chunk, &sent);
        ++to_send;
      }
      if (++part < arrived[step].size()) continue;
      ++step;
      part = 0;
    }
    return step == steps && sent == to_send;
  });
  plan.copy_own(me);
}

}  // namespace ours::tcp
