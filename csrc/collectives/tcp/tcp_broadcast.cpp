#include <vector>

#include "collectives/tcp/dissemination.h"
#include "collectives/tcp/tcp_algorithms.h"

// broadcast goes along a chain that begins at the root if the message has as many parts as the chain has links: each
// rank sends a part on while the next one arrives, so that every link carries the message once and all at the same
// time. Shorter messages go down a binomial tree, which is log2(P) links deep: rank v, counted from the root, gets
// them from the rank whose number is v without its highest bit.
//
// The data begins to move at once, but is taken in only after a dissemination has shown that all ranks made the same
// call. The dissemination runs beside the data and rarely takes longer.

namespace ours::tcp {

void broadcast(TcpRun& run, const ExchangePlan& plan) {
  const Span buffer = plan.buffer();
  const int root = plan.root;
  Dissemination all(run.members());

  const size_t parts = run.tcp.parts(buffer.bytes);
  const int place = (run.rank - root + run.size) % run.size;
  const auto rank_at = [&](int p) { return (p + root) % run.size; };
  int parent = -1;
  std::vector<int> children;
  if (parts >= static_cast<size_t>(run.size)) {
    if (place > 0) parent = rank_at(place - 1);
    if (place + 1 < run.size) children.push_back(rank_at(place + 1));
  } else {
    int bit = 1;
    for (; bit <= place; bit *= 2) parent = rank_at(place - bit);
    for (; place + bit < run.size; bit *= 2) children.push_back(rank_at(place + bit));
  }

  auto* const data = static_cast<std::byte*>(buffer.data);
  const size_t chunk = run.plan.chunk_bytes;
  Tally sent;
  size_t passed_on = 0;
  std::vector<Tally> arrived(parts);
  const auto pass_on = [&] {
    for (const int child : children) {
      run.tcp.send_part({child, 0, buffer.bytes}, passed_on, data + passed_on * chunk, sent);
    }
    ++passed_on;
  };
  while (parent < 0 && passed_on < parts) pass_on();
  bool agreed = false;
  run.tcp.run([&] {
    if (!agreed) {
      agreed = all.advance();
      if (!agreed) return false;
      if (parent >= 0) {
        for (size_t part = 0; part < parts; ++part) {
          run.tcp.receive_part({parent, 0, buffer.bytes}, part, data + part * chunk, arrived[part]);
        }
      }
    }
    while (passed_on < parts && arrived[passed_on].complete()) pass_on();
    return passed_on == parts && sent.complete();
  });
}

}  // namespace ours::tcp
