#include <algorithm>
#include <cstring>

#include "collectives/hierarchical_stages.h"
#include "collectives/node_group_impl.h"

// all_reduce and reduce over several nodes.
//
// Short messages: every rank writes its input into its stage, and after one synchronisation the node's leader reduces
// all stages, sends the sum to all other leaders and reduces theirs. A second synchronisation, and all ranks read the
// result. One message's time, and two synchronisations of the node.
//
// Long messages: a reduce-scatter in the node, of which a rank gets a slice; an all-reduce of the slice among the ranks
// of equal place on all nodes, the rail (rail_reduction.h); an all-gather in the node. Each host sends 2 (H - 1) / H of
// the array, which is the least, and all ranks share the work of sending. As a rail needs a rank on every node, there
// are as many as the smallest node has ranks; the others of a larger node give their inputs and get their results.
//
// All three steps are pipelined in chunks. Where the node's ranks have their data in the heap, a rail reads its slices
// there and writes the results back to all, without staging and without waiting for its node:
// hierarchical_heap_reduce.cpp. Else, chunks go through the stages in rounds: hierarchical_stages.cpp.
//
// The order of an element's sum is that of ranks within a node, and then that of nodes, whatever the size of the
// message, so the bits are always the same. An average divides once, in the end; only float16 is multiplied by the
// inverse within the node, where its sum could be beyond its range. Sums of a node travel in the type of the call: a
// half type is rounded once more for each node. With OURS_WIRE_DTYPE, those of long float32 messages are, too.
//
// Nothing is written before all nodes are known to have made the same call: results depend on messages of all, which
// begin with what was called, and which no rank sends before it has compared its call with those of its node.

namespace ours {

void HierarchicalGroup::all_reduce(const Call& call, const void* in, void* out, size_t count,
                                   const Reduction& reduction) {
  check_supported(reduction.kind, call.dtype);
  const size_t element = size_of(call.dtype);
  const Pieces to(out, count, element);
  const Pieces from(const_cast<void*>(in), count, element);
  const CallRecord record = record_of(call, count, reduction, -1);
  collective(call, record, [&](const Running& run) {
    reduce_to(run, {in == out ? to : from, &to, call.dtype, reduction, -1, call.dtype});
  });
}

void HierarchicalGroup::all_reduce(const Call& call, const std::vector<Span>& pieces, const Reduction& reduction) {
  check_supported(reduction.kind, call.dtype);
  const Pieces data(pieces, size_of(call.dtype));
  const CallRecord record = record_of(call, data.count(), reduction, -1);
  collective(call, record,
             [&](const Running& run) { reduce_to(run, {data, &data, call.dtype, reduction, -1, call.dtype}); });
}

void HierarchicalGroup::reduce(const Call& call, const void* in, void* out, size_t count, const Reduction& reduction,
                               int root) {
  check_supported(reduction.kind, call.dtype);
  check_root(root, size());
  const size_t element = size_of(call.dtype);
  const Pieces to(out, count, element);
  const Pieces from(const_cast<void*>(in), count, element);
  const CallRecord record = record_of(call, count, reduction, root);
  collective(call, record, [&](const Running& run) {
    reduce_to(run, {from, rank() == root ? &to : nullptr, call.dtype, reduction, topology_.node_of(root), call.dtype});
  });
}

void HierarchicalGroup::reduce_to(const Running& run, const Reducing& job) {
  node_.reserve_stage();
  const size_t bytes = job.in.count() * size_of(job.dtype);
  const auto others = static_cast<size_t>(std::max(nodes() - 1, 1));
  // Sending the whole to every node costs more bytes with each of them.
  if (bytes <= mesh_->plan().small_bytes / others) {
    reduce_short(run, job);
  } else {
    reduce_long(run, job);
  }
}

void HierarchicalGroup::reduce_short(const Running& run, const Reducing& job) {
  const size_t element = size_of(job.dtype);
  const size_t count = job.in.count();
  const size_t bytes = count * element;
  // The leader's, of all nodes.
  std::byte* const sums = scratch((static_cast<size_t>(nodes()) + 1) * bytes);
  std::byte* const own = sums + static_cast<size_t>(node_index_) * bytes;
  const auto give = [&](const std::byte* result) {
    if (job.out == nullptr) return;
    job.out->visit(
        0, count, [&](std::byte* data, size_t at, size_t n) { std::memcpy(data, result + at * element, n * element); });
  };

  if (bytes > session_->layout().chunk_bytes) {
    // This node was told to use less memory than the others.
    open(run);
    const Pieces sum(own, count, element);
    const auto reduce = [&] {
      node_.reduce_to(run.call, run.record, job.in, is_leader() ? &sum : nullptr,
                      within_node(job.reduction, job.travels));
    };
    run.tcp.away(reduce);
    std::byte* const result = sums + static_cast<size_t>(nodes()) * bytes;
    if (is_leader()) exchange_sums(run, job, sums, result);
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
    exchange_sums(run, job, sums, node_.stage(local_, node_.barrier_.next_parity()));
  }
  sync(run);
  give(node_.stage(0, node_.barrier_.parity()));
}

void HierarchicalGroup::exchange_sums(const Running& run, const Reducing& job, std::byte* sums, std::byte* result) {
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

RailReduction::Job HierarchicalGroup::rail_job(const Reducing& job, const RailSlices& slices) const {
  RailReduction::Job rail{
      {}, node_index_, local_, job.reader, job.dtype, job.travels, between_nodes(job.reduction, job.travels), slices};
  for (int node = 0; node < nodes(); ++node) {
    rail.peers.push_back(topology_.ranks_of(node)[static_cast<size_t>(local_)]);
  }
  return rail;
}

DType HierarchicalGroup::travelling_type(const Reducing& job) const {
  const ReduceKind kind = job.reduction.kind;
  const bool adds = kind == ReduceKind::Sum || kind == ReduceKind::Avg || kind == ReduceKind::PremulSum;
  const WireType wire = mesh_->plan().wire;
  if (job.dtype != DType::Float32 || !adds || wire == WireType::Float32) return job.dtype;
  return wire == WireType::BFloat16 ? DType::BFloat16 : DType::Float16;
}

void HierarchicalGroup::reduce_long(const Running& run, const Reducing& asked) {
  Reducing job = asked;
  job.travels = travelling_type(job);
  const size_t element = size_of(job.dtype);
  const RailSlices slices{job.in.count(), 2 * mesh_->plan().chunk_bytes / element, rails_, kCacheLine / element};
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
  if (alone) return reduce_in_place(run, job, slices, false);
  const int in_heap = node_.ranks_in_heap();
  if (in_heap == session_->size()) return reduce_in_place(run, job, slices, true);
  if (in_heap > 0) {
    stages.copy_in(0);
    sync(run);
  }
  reduce_staged(run, job, stages);
}

}  // namespace ours
