#include <algorithm>
#include <cstring>

#include "collectives/doubling.h"
#include "collectives/hierarchical/hierarchical_stages.h"
#include "collectives/hierarchical/rail_direct.h"
#include "collectives/hierarchical/rail_ring.h"
#include "collectives/node/node_group_impl.h"
#include "collectives/partial_sums.h"

// all_reduce and reduce over several nodes.
//
// The table of algorithms (select.h) says what is short, and what is meant by many.
//
// Short messages: every rank writes its input into its stage, and after one synchronisation the node's leader reduces
// all stages, sends the sum to all other leaders and reduces theirs; where nodes are many, leaders exchange their sums
// by recursive doubling (doubling.h). A second synchronisation, and all ranks read the result. One message's time, or
// that of log2(H), and two synchronisations of the node. What a stage cannot hold is reduced to the leader, and sent
// from it, by collectives of the node.
//
// Long messages: a reduce-scatter in the node, of which a rank gets a slice; an all-reduce of the slice among the ranks
// of equal place on all nodes, the rail (rail_direct.h, or, where nodes are many, rail_ring.h); an all-gather in the
// node. Each host sends 2 (H - 1) / H of the array, which is the least, and all ranks share the work of sending. As a
// rail needs a rank on every node, there are as many as the smallest node has ranks; the others of a larger node give
// their inputs and get their results.
//
// All three steps are pipelined in chunks. Where the node's ranks have their data in the heap, a rail reads its slices
// there and writes the results back to all, without staging and without waiting for its node:
// hierarchical_heap_reduce.cpp. Else, chunks go through the stages in rounds: hierarchical_stages.cpp.
//
// The order of an element's sum is that of ranks within a node, and then that of nodes, whatever the size of the
// message, so the bits are always the same; but for doubling, which adds up nodes as a tree, and rings, which begin
// with another node for each part. An average divides once, in the end; only float16 is multiplied by the inverse
// within the node, where its sum could be beyond its range. Sums of a node travel in the type of the call: a half type
// is rounded once more for each node, or exchange. With OURS_WIRE_DTYPE, those of long float32 messages are, too;
// around a ring the error would grow with every node, so these go directly.
//
// Nothing is written before all nodes are known to have made the same call: results depend on messages of all, which
// begin with what was called, and which no rank sends before it has compared its call with those of its node.

namespace ours {

void HierarchicalGroup::do_reduce(const Running& run, const Reducing& job) {
  const int reader = job.root < 0 ? -1 : topology_.node_of(job.root);
  reduce_to(stride(run), {job.in, job.out, run.call.dtype, job.reduction, reader, run.call.dtype});
}

void HierarchicalGroup::reduce_to(const Stride& run, const NodeReducing& job) {
  node_.reserve_stage();
  const Algorithm chosen = choose(job);
  if (chosen == Algorithm::Whole || chosen == Algorithm::Doubling) {
    reduce_short(run, job, chosen == Algorithm::Doubling);
  } else {
    reduce_long(run, job, chosen == Algorithm::Ring);
  }
}

Algorithm HierarchicalGroup::choose(const NodeReducing& job) const {
  const Selectable operation = job.reader < 0 ? Selectable::AllReduce : Selectable::Reduce;
  const Algorithm chosen = selection_.choose({operation, nodes(), most_local_, job.in.count() * size_of(job.dtype)});
  const bool cut = chosen == Algorithm::Direct || chosen == Algorithm::Ring;
  // Of nothing, no rank has a slice, and nobody would hear what the others called.
  if (cut && job.in.count() == 0) return Algorithm::Doubling;
  // Nobody is a neighbour of itself.
  if (chosen == Algorithm::Ring && (nodes() == 1 || travelling_type(job) != job.dtype)) return Algorithm::Direct;
  return chosen;
}

void HierarchicalGroup::reduce_short(const Stride& run, const NodeReducing& job, bool doubling) {
  const size_t element = size_of(job.dtype);
  const size_t count = job.in.count();
  const size_t bytes = count * element;
  // The leader's: of all nodes, or its own and that of another, and then the result.
  const size_t held = doubling ? 2 : static_cast<size_t>(nodes());
  std::byte* const sums = scratch((held + 1) * bytes);
  std::byte* const own = doubling ? sums : sums + static_cast<size_t>(node_index_) * bytes;
  const auto exchange = [&](std::byte* result) {
    if (doubling) return exchange_doubling(run, job, sums, result);
    exchange_whole(run, job, sums, result);
  };
  const auto give = [&](const std::byte* result) {
    if (job.out == nullptr) return;
    job.out->visit(
        0, count, [&](std::byte* data, size_t at, size_t n) { std::memcpy(data, result + at * element, n * element); });
  };

  if (bytes > session_->layout().chunk_bytes) {
    // More than a stage holds.
    open(run);
    const Pieces sum(own, count, element);
    const auto reduce = [&] {
      node_.reduce_to(run.call, run.record, job.in, is_leader() ? &sum : nullptr,
                      within_node(job.reduction, job.travels));
    };
    run.tcp.away(reduce);
    std::byte* const result = sums + held * bytes;
    if (is_leader()) exchange(result);
    run.tcp.away([&] { node_.broadcast(run.call, Span{result, bytes}, 0); });
    return give(result);
  }

  std::byte* const mine = node_.stage(local_, node_.barrier_.next_parity());
  job.in.visit(0, count, [&](std::byte* data, size_t at, size_t n) {
    node_.write_.copy(mine + at * element, data, n * element);
  });
  open(run);
  if (is_leader()) {
    Sources stages(session_->size());
    for (int r = 0; r < session_->size(); ++r) stages.data()[r] = node_.stage(r, node_.barrier_.parity());
    if (count != 0) {
      ours::reduce(own, stages.data(), session_->size(), count, job.dtype, within_node(job.reduction, job.travels));
    }
    exchange(node_.stage(local_, node_.barrier_.next_parity()));
  }
  sync(run);
  give(node_.stage(0, node_.barrier_.parity()));
}

void HierarchicalGroup::exchange_whole(const Stride& run, const NodeReducing& job, std::byte* sums, std::byte* result) {
  const size_t count = job.in.count();
  const size_t bytes = count * size_of(job.dtype);
  const auto hosts = static_cast<size_t>(nodes());
  const auto here = static_cast<size_t>(node_index_);
  size_t sent = 0, received = 0;
  for (size_t i = 1; i < hosts; ++i) {
    run.tcp.send({leaders_[(here + i) % hosts], 0, bytes}, sums + here * bytes, &sent);
  }
  for (size_t i = 1; i < hosts; ++i) {
    const size_t from = (here + hosts - i) % hosts;
    run.tcp.receive({leaders_[from], 0, bytes}, sums + from * bytes, &received);
  }
  const size_t all = (hosts - 1) * run.tcp.parts(bytes);
  wait(run, [&] { return sent == all && received == all; });
  Sources all_sums(nodes());
  for (size_t node = 0; node < hosts; ++node) all_sums.data()[node] = sums + node * bytes;
  if (count != 0)
    ours::reduce(result, all_sums.data(), nodes(), count, job.dtype, between_nodes(job.reduction, job.travels));
}

void HierarchicalGroup::exchange_doubling(const Stride& run, const NodeReducing& job, std::byte* sum,
                                          std::byte* result) {
  const size_t count = job.in.count();
  const size_t bytes = count * size_of(job.dtype);
  const size_t hosts = static_cast<size_t>(nodes());
  const int before = leaders_[(static_cast<size_t>(node_index_) + hosts - 1) % hosts];
  const int after = leaders_[(static_cast<size_t>(node_index_) + 1) % hosts];
  // Calls of other sizes may go other ways, on which their messages do not meet these. Wherever nodes differ, there is
  // one that differs from the next.
  if (hosts > 1) run.tcp.agree(0, after);
  Doubling(run.tcp, leaders_, node_index_)
      .reduce(sum, sum + bytes, count, job.dtype, between_nodes(job.reduction, job.travels),
              [&](const std::function<bool()>& done) { wait(run, done); });
  if (hosts > 1) wait(run, [&] { return run.tcp.agreed(0, before); });
  if (bytes != 0) std::memcpy(result, sum, bytes);
}

std::unique_ptr<Rail> HierarchicalGroup::make_rail(const Stride& run, const NodeReducing& job, const RailSlices& slices,
                                                   bool ring) {
  if (local_ >= slices.rails) return nullptr;
  Rail::Job work{
      {}, node_index_, local_, job.reader, job.dtype, job.travels, between_nodes(job.reduction, job.travels), slices};
  for (int node = 0; node < nodes(); ++node) {
    work.peers.push_back(topology_.ranks_of(node)[static_cast<size_t>(local_)]);
  }
  std::unique_ptr<Rail> rail;
  if (ring) {
    rail = std::make_unique<RailRing>(run.tcp, std::move(work));
  } else {
    rail = std::make_unique<RailDirect>(run.tcp, std::move(work));
  }
  return rail;
}

DType HierarchicalGroup::travelling_type(const NodeReducing& job) const {
  const ReduceKind kind = job.reduction.kind;
  const bool adds = kind == ReduceKind::Sum || kind == ReduceKind::Avg || kind == ReduceKind::PremulSum;
  const WireType wire = mesh_->plan().wire;
  if (job.dtype != DType::Float32 || !adds || wire == WireType::Float32) return job.dtype;
  return wire == WireType::BFloat16 ? DType::BFloat16 : DType::Float16;
}

void HierarchicalGroup::reduce_long(const Stride& run, const NodeReducing& asked, bool ring) {
  NodeReducing job = asked;
  job.travels = travelling_type(job);
  const size_t element = size_of(job.dtype);
  size_t chunk = 2 * mesh_->plan().chunk_bytes;
  if (ring) {
    chunk = RailRing::chunk_bytes(mesh_->plan().chunk_bytes, static_cast<size_t>(nodes()), static_cast<size_t>(rails_));
  }
  const RailSlices slices{job.in.count(), chunk / element, rails_, kCacheLine / element};
  node_.write_.begin();
  const auto saw = [&](std::byte* data, size_t, size_t n) { node_.saw_buffer(data, n * element); };
  job.in.visit(0, job.in.count(), saw);
  if (job.out != nullptr && job.out != &job.in) job.out->visit(0, job.out->count(), saw);

  // A rank that is alone on its node shares its memory with all ranks of it, wherever it lies.
  const bool alone = session_->size() == 1;
  Stages stages(*this, job, slices);
  const bool in_place = job.out == &job.in && !alone && node_.publish_places(job.in, element);
  if (!in_place) {
    session_->self().heap_parts[node_.barrier_.next_parity()] = 0;
    if (!alone) stages.copy_in(0);
  }
  open(run);
  const std::unique_ptr<Rail> rail = make_rail(run, job, slices, ring);
  const int in_heap = node_.ranks_in_heap();
  if (alone || in_heap == session_->size()) {
    if (rail != nullptr) give_scratch(*rail);
    return reduce_in_place(run, job, slices, !alone, rail.get());
  }
  node_.exposed_.reset();  // nobody writes to places that only some have
  if (rail != nullptr) stages.give_memory(*rail);
  if (in_heap > 0) {
    stages.copy_in(0);
    sync(run);
  }
  reduce_staged(run, stages, rail.get());
}

}  // namespace ours
