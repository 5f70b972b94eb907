#include "collectives/hierarchical/hierarchical_algorithms.h"

// all_reduce and reduce over several nodes. The table of algorithms (select.h) says what counts as short
// (hierarchical_reduce_short.cpp) and what as long (hierarchical_reduce_long.cpp).
//
// An element is summed in the order of ranks within a node, and then in that of nodes, whatever the size of the array.
// The exceptions are doubling, which adds up nodes as a tree, and a ring, which begins with another node for each part.
// An average divides once, in the end; only float16 is multiplied by the inverse within the node, since its sum could
// be out of range. Sums of a node travel in the type of the call: a half type is rounded once more for each node, or
// exchange. With OURS_WIRE_DTYPE, those of long float32 arrays are rounded, too; around a ring the error would grow
// with every node, so these arrays go directly.
//
// Nothing is written before all nodes are known to have made the same call: results depend on messages from all nodes,
// each of which begins with what was called, and no rank sends one before its node has compared its calls.

namespace ours::hierarchical {

namespace {

DType travelling_type(const Reducing& job, WireType wire) {
  const ReduceKind kind = job.reduction.kind;
  const bool adds = kind == ReduceKind::Sum || kind == ReduceKind::Avg || kind == ReduceKind::PremulSum;
  if (job.dtype != DType::Float32 || !adds || wire == WireType::Float32) return job.dtype;
  return wire == WireType::BFloat16 ? DType::BFloat16 : DType::Float16;
}

Algorithm choose(const HierarchicalRun& run, const Selection& selection, const Reducing& job) {
  const Selectable operation = job.reader < 0 ? Selectable::AllReduce : Selectable::Reduce;
  const int nodes = run.map.nodes();
  const Algorithm chosen = selection.choose({operation, nodes, run.map.most_local(), job.in.count() * job.element()});
  const bool converts = travelling_type(job, run.plan.wire) != job.dtype;
  switch (chosen) {
    case Algorithm::Whole:
    case Algorithm::Doubling:
      break;
    case Algorithm::Direct:
    case Algorithm::Ring:
      // Nothing would be sent for an empty array, so ranks would not compare their calls.
      if (job.in.count() == 0) return Algorithm::Doubling;
      // A ring converts nothing, and needs at least two nodes.
      if (nodes == 1 || converts) return Algorithm::Direct;
  }
  return chosen;
}

}  // namespace

void reduce(HierarchicalRun& run, const Selection& selection, const ours::Reducing& asked) {
  const DType dtype = run.running.call.dtype;
  Reducing job{asked.in, asked.out, dtype, asked.reduction, asked.root < 0 ? -1 : run.map.node_of(asked.root), dtype};
  const Algorithm chosen = choose(run, selection, job);
  switch (chosen) {
    case Algorithm::Whole:
    case Algorithm::Doubling:
      run.rounds.reserve_beginning(job.in.count() * job.element());
      return reduce_short(run, job, chosen);
    case Algorithm::Direct:
    case Algorithm::Ring:
      run.rounds.reserve(2);
      job.travels = travelling_type(job, run.plan.wire);
      return reduce_long(run, job, chosen);
  }
}

}  // namespace ours::hierarchical
