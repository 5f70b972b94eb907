#include <algorithm>
#include <cstring>

#include "collectives/call_checks.h"
#include "collectives/hierarchical/hierarchical_group.h"
#include "collectives/node/node_group_impl.h"

// gather, scatter and all_to_all over several nodes: every message goes directly from its owner to its reader, within a
// node through shared memory. Before any is read, all are compared with what their readers expect: within the node by
// tables, between nodes by the headers of what has come in, whose data stays where it is meanwhile. Then all ranks
// confirm that they found what they expected: the node's ranks to its leader, and the leaders to each other.

namespace ours {

namespace {

bool overlap(const ConstSpan& a, const Span& b) {
  const auto from = reinterpret_cast<uintptr_t>(a.data);
  const auto to = reinterpret_cast<uintptr_t>(b.data);
  return from < to + b.bytes && to < from + a.bytes;
}

}  // namespace

void HierarchicalGroup::gather(const Call& call, ConstSpan input, const std::vector<Span>& outputs, int root) {
  check_root(root, size());
  Exchange plan;
  plan.sends.resize(static_cast<size_t>(size()));
  plan.receives.resize(static_cast<size_t>(size()));
  plan.sends[static_cast<size_t>(root)] = input;
  if (rank() == root) {
    check_one_a_rank(call, outputs.size(), static_cast<size_t>(size()));
    plan.receives.assign(outputs.begin(), outputs.end());
  }
  CallRecord record = record_of(call);
  record.root = root;
  exchange_checked(call, record, plan);
}

void HierarchicalGroup::scatter(const Call& call, const std::vector<ConstSpan>& inputs, Span output, int root) {
  check_root(root, size());
  Exchange plan;
  plan.sends.resize(static_cast<size_t>(size()));
  plan.receives.resize(static_cast<size_t>(size()));
  plan.receives[static_cast<size_t>(root)] = output;
  if (rank() == root) {
    check_one_a_rank(call, inputs.size(), static_cast<size_t>(size()));
    plan.sends.assign(inputs.begin(), inputs.end());
  }
  CallRecord record = record_of(call);
  record.root = root;
  exchange_checked(call, record, plan);
}

void HierarchicalGroup::all_to_all(const Call& call, const std::vector<ConstSpan>& inputs,
                                   const std::vector<Span>& outputs) {
  check_one_a_rank(call, inputs.size(), static_cast<size_t>(size()));
  check_one_a_rank(call, outputs.size(), static_cast<size_t>(size()));
  Exchange plan;
  plan.sends.assign(inputs.begin(), inputs.end());
  plan.receives.assign(outputs.begin(), outputs.end());
  exchange_checked(call, record_of(call), plan);
}

void HierarchicalGroup::exchange_checked(const Call& call, const CallRecord& record, const Exchange& plan) {
  const auto& gives = plan.sends[static_cast<size_t>(rank())];
  const auto& expects = plan.receives[static_cast<size_t>(rank())];
  if (gives && expects) check_own(call, rank(), gives->bytes, expects->bytes);
  collective(call, record, [&](const Running& run) { exchange(run, plan); });
}

void HierarchicalGroup::exchange(const Running& run, const Exchange& plan) {
  struct Source {
    int rank;
    Span span;
  };
  std::vector<Source> sources;
  NodeGroup::Exchange inside;
  inside.common = false;
  for (const int r : members()) {
    inside.sends.push_back(plan.sends[static_cast<size_t>(r)].value_or(ConstSpan{}));
    inside.receives.push_back(plan.receives[static_cast<size_t>(r)].value_or(Span{}));
  }
  // What this rank has for itself counts where it both gives and gets it.
  const auto self = static_cast<size_t>(rank());
  if (!plan.sends[self] || !plan.receives[self]) {
    inside.sends[static_cast<size_t>(local_)] = ConstSpan{};
    inside.receives[static_cast<size_t>(local_)] = Span{};
  }
  run.tcp.without_lock([&] {
    node_.publish_tables(inside);
    node_.publish_record(run.record);
    node_.sync(run.call, run.record);
    node_.check_records(run.record);
    node_.check_tables(run.record);
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
    if (const auto& back = plan.receives[static_cast<size_t>(to)]; back && overlap(*span, *back)) {
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
    run.tcp.mismatch(run.tcp.describe(from.rank) + " sends " + std::to_string(header->total) + " bytes to " +
                     run.tcp.describe(rank()) + ", which expects " + std::to_string(from.span.bytes) + ", in " +
                     describe_record(run.record) + ". Make the sizes of the tensors agree on all ranks");
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
  run.tcp.without_lock([&] { node_.exchange(run.call, run.record, inside); });
  wait(run, [&] { return sent == to_send && received == to_receive; }, false);
}

}  // namespace ours
