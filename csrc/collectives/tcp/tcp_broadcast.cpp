#include <vector>

#include "collectives/tcp/tcp_group_impl.h"

// broadcast: along a chain that begins at the root, where the message has as many parts as the chain has links: each
// rank sends a part on while the next one arrives, so that every link carries the message once and all at the same
// time. Shorter messages go down a binomial tree, which is log2(P) links deep: rank v, counted from the root, gets them
// from v without its highest bit.
//
// The data begins to move at once, but is taken in only after a dissemination has shown that all ranks made the same
// call: it runs beside the data and is rarely the longer of the two.

namespace ours {

void TcpGroup::broadcast_plan(const Running& run, const ExchangePlan& plan) {
  const Span buffer = plan.buffer();
  const int root = plan.root;
  TcpCall tcp(*mesh_, facts_of(*mesh_, run));
  Dissemination all(tcp, rank(), size());

  const size_t parts = tcp.parts(buffer.bytes);
  const int place = (rank() - root + size()) % size();
  const auto rank_at = [&](int p) { return (p + root) % size(); };
  int parent = -1;
  std::vector<int> children;
  if (parts >= static_cast<size_t>(size())) {
    if (place > 0) parent = rank_at(place - 1);
    if (place + 1 < size()) children.push_back(rank_at(place + 1));
  } else {
    int bit = 1;
    for (; bit <= place; bit *= 2) parent = rank_at(place - bit);
    for (; place + bit < size(); bit *= 2) children.push_back(rank_at(place + bit));
  }

  auto* const data = static_cast<std::byte*>(buffer.data);
  const size_t chunk = mesh_->plan().chunk_bytes;
  size_t sent = 0, passed_on = 0;
  std::vector<size_t> arrived(parts, 0);
  const auto pass_on = [&] {
    for (const int child : children) {
      tcp.send_part({child, 0, buffer.bytes}, passed_on, data + passed_on * chunk, &sent);
    }
    ++passed_on;
  };
  while (parent < 0 && passed_on < parts) pass_on();
  bool agreed = false;
  tcp.run([&] {
    if (!agreed) {
      agreed = all.advance();
      if (!agreed) return false;
      if (parent >= 0) {
        for (size_t part = 0; part < parts; ++part) {
          tcp.receive_part({parent, 0, buffer.bytes}, part, data + part * chunk, &arrived[part]);
        }
      }
    }
    while (passed_on < parts && arrived[passed_on] == 1) pass_on();
    return passed_on == parts && sent == parts * children.size();
  });
}

}  // namespace ours
