#include "collectives/tcp/equal_sizes.h"
#include "collectives/tcp/tcp_algorithms.h"

// all_gather among many ranks, around a ring like that of tcp_reduce_ring.cpp: in step t, rank r gets the block of
// rank r - 1 - t from rank r - 1, and sends it on in the next step. Before that, all ranks compare the sizes that they
// expect.

namespace ours::tcp {

void all_gather(TcpRun& run, const ExchangePlan& plan) {
  const auto ranks = static_cast<size_t>(run.size);
  const auto me = static_cast<size_t>(run.rank);
  const int next = static_cast<int>((me + 1) % ranks);
  const int before = static_cast<int>((me + ranks - 1) % ranks);
  const size_t chunk = run.plan.chunk_bytes;

  std::vector<uint64_t> sizes(ranks);
  for (size_t r = 0; r < ranks; ++r) sizes[r] = plan.received(r);
  compare_sizes(run.members(), sizes, run.running.record);

  const size_t steps = ranks - 1;
  const auto block_of = [&](size_t step) { return (me + ranks - 1 - step) % ranks; };
  Tally sent;
  if (steps > 0) run.tcp.send({next, 0, plan.sent(me)}, plan.sends[me]->data, sent);
  std::vector<std::vector<Tally>> arrived(steps);
  for (size_t step = 0; step < steps; ++step) {
    const Span block = *plan.receives[block_of(step)];
    arrived[step].resize(run.tcp.parts(block.bytes));
    for (size_t part = 0; part < arrived[step].size(); ++part) {
      run.tcp.receive_part({before, static_cast<uint16_t>(step), block.bytes}, part,
                           static_cast<std::byte*>(block.data) + part * chunk, arrived[step][part]);
    }
  }
  size_t step = 0, part = 0;
  run.tcp.run([&] {
    while (step < steps && arrived[step][part].complete()) {
      const Span block = *plan.receives[block_of(step)];
      if (step + 1 < steps) {
        run.tcp.send_part({next, static_cast<uint16_t>(step + 1), block.bytes}, part,
                          static_cast<std::byte*>(block.data) + part * chunk, sent);
      }
      if (++part < arrived[step].size()) continue;
      ++step;
      part = 0;
    }
    return step == steps && sent.complete();
  });
  plan.copy_own(me);
}

}  // namespace ours::tcp
