#include <algorithm>
#include <cstring>

#include "collectives/hierarchical/hierarchical_group.h"
#include "collectives/node/node_group_impl.h"

// gather, scatter and all_to_all over several nodes: every message goes directly from its owner to its reader, within a
// node through shared memory. Before any is read, all are compared with what their readers expect: within the node by
// tables, between nodes by the headers of what has come in, whose data stays where it is meanwhile. Then all ranks
// confirm that they found what they expected: the node's ranks to its leader, and the leaders to each other.

namespace ours {

void HierarchicalGroup::do_exchange(const Running& run, const ExchangePlan& plan) {
  if (plan.movement == Movement::Broadcast) return broadcast_batches(stride(run), plan);
  if (plan.movement == Movement::AllGather) return all_gather_blocks(stride(run), plan);
  exchange_directly(stride(run), plan);
}

void HierarchicalGroup::exchange_directly(const Stride& run, const ExchangePlan& plan) {
  struct Source {
    int rank;
    Span span;
  };
  std::vector<Source> sources;
  ExchangePlan inside{Movement::AllToAll, -1, {}, {}};
  for (const int r : members()) {
    inside.sends.push_back(plan.sends[static_cast<size_t>(r)]);
    inside.receives.push_back(plan.receives[static_cast<size_t>(r)]);
  }
  run.tcp.away([&] {
    node_.publish_sizes(inside);
    node_.publish_record(run.record);
    node_.sync(run.call, run.record);
    node_.check_records(run.record);
    node_.check_published_sizes(run.record);
  });

  size_t sent = 0, to_send = 0, received = 0, to_receive = 0;
  for (int i = 1; i < size(); ++i) {
    const int to = (rank() + i) % size();
    const int from = (rank() - i + size()) % size();
    const auto& comes = plan.receives[static_cast<size_t>(from)];
    if (comes && topology_.node_of(from) != node_index_) sources.push_back({from, *comes});
    const auto& span = plan.sends[static_cast<size_t>(to)];
    if (!span || topology_.node_of(to) == node_index_) continue;
    const void* data = span->data;
    if (plan.overlaps(static_cast<size_t>(to))) {
      // What comes from that rank goes where this lies, and may come before this has gone.
      std::byte* const copy = run.tcp.keep(span->bytes);
      std::memcpy(copy, data, span->bytes);
      data = copy;
    }
    run.tcp.send({to, 0, span->bytes}, data, &sent);
    to_send += run.tcp.parts(span->bytes);
  }

  std::vector<Source> unseen = sources;
  for (const Source& from : unseen) run.tcp.expect(from.rank, true);
  const auto look = [&](const Source& from) {
    const FrameHeader* header = run.tcp.next_from(from.rank);
    if (header == nullptr) return false;
    run.tcp.expect(from.rank, false);
    if (header->total == from.span.bytes) return true;
    const SizesDiffer differ{run.tcp.describe(from.rank), run.tcp.describe(rank()), header->total, from.span.bytes};
    run.tcp.mismatch(differ.in(run.record));
  };
  wait(run, [&] {
    unseen.erase(std::remove_if(unseen.begin(), unseen.end(), look), unseen.end());
    return unseen.empty();
  });
  sync(run);
  agree(run);

  for (const Source& from : sources) {
    run.tcp.receive({from.rank, 0, from.span.bytes}, from.span.data, &received);
    to_receive += run.tcp.parts(from.span.bytes);
  }
  push(run);
  run.tcp.away([&] { node_.exchange(run.call, inside); });
  wait(run, [&] { return sent == to_send && received == to_receive; }, false);
}

}  // namespace ours
