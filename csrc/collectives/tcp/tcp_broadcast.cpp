#include <vector>

#include "collectives/broadcast_links.h"
#include "collectives/tcp/dissemination.h"
#include "collectives/tcp/tcp_algorithms.h"

// broadcast goes from rank to rank along a chain or down a tree (see broadcast_links.h). The data begins to move at
// once, but is taken in only after a dissemination has shown that all ranks made the same call. The dissemination runs
// beside the data and rarely takes longer.

namespace ours::tcp {

void broadcast(TcpRun& run, const ExchangePlan& plan) {
  const Span buffer = plan.buffer();
  const int root = plan.root;
  Dissemination all(run.members());

  const size_t parts = run.tcp.parts(buffer.bytes);
  const BroadcastLinks links = broadcast_links((run.rank - root + run.size) % run.size, run.size, parts);
  const auto rank_at = [&](int place) { return (place + root) % run.size; };

  auto* const data = static_cast<std::byte*>(buffer.data);
  const size_t chunk = run.plan.chunk_bytes;
  Tally sent;
  size_t passed_on = 0;
  std::vector<Tally> arrived(parts);
  const auto pass_on = [&] {
    for (const int child : links.children) {
      run.tcp.send_part({rank_at(child), 0, buffer.bytes}, passed_on, data + passed_on * chunk, sent);
    }
    ++passed_on;
  };
  while (links.parent < 0 && passed_on < parts) pass_on();
  bool agreed = false;
  run.tcp.run([&] {
    if (!agreed) {
      agreed = all.advance();
      if (!agreed) return false;
      if (links.parent >= 0) {
        for (size_t part = 0; part < parts; ++part) {
          run.tcp.receive_part({rank_at(links.parent), 0, buffer.bytes}, part, data + part * chunk, arrived[part]);
        }
      }
    }
    while (passed_on < parts && arrived[passed_on].complete()) pass_on();
    return passed_on == parts && sent.complete();
  });
}

}  // namespace ours::tcp
