#include <optional>

#include "collectives/hierarchical/hierarchical_algorithms.h"
#include "collectives/hierarchical/hierarchical_stages.h"
#include "collectives/hierarchical/rail_direct.h"
#include "collectives/hierarchical/rail_ring.h"
#include "collectives/partial_sums.h"
#include "common/error.h"

// Long arrays take three steps: a reduce-scatter in the node, which gives each rank a slice; an all-reduce of the
// slice among the ranks of equal place on all nodes, called a rail (rail_direct.h, or rail_ring.h for many nodes);
// and an all-gather in the node. Each node sends 2 (H - 1) / H of the array to the H - 1 others, which is the
// minimum, and the rails share the work of sending. A rail needs a rank on every node, and messages that are long
// enough to be worth it, so there may be fewer than a node has ranks (rail_slices.h).
//
// All three steps are pipelined in chunks. If the node's ranks have their data in the heap, and each has a rail, a rail
// reads its slices there and writes the results back to all, without staging and without waiting for its node:
// hierarchical_reduce_in_place.cpp. Otherwise chunks go through the stages in rounds: hierarchical_reduce_staged.cpp.

namespace ours::hierarchical {

namespace {

/// Makes this rank's rail, without its memory; null if the rank is on none.
std::unique_ptr<Rail> make_rail(HierarchicalRun& run, const Reducing& job, const RailSlices& slices,
                                Algorithm algorithm) {
  const int local = run.map.local();
  if (local >= slices.rails) return nullptr;
  const Reduction between = between_nodes(job.reduction, job.travels);
  Rail::Job work{{}, run.map.here(), local, job.reader, job.dtype, job.travels, between, slices};
  for (int node = 0; node < run.map.nodes(); ++node) {
    work.peers.push_back(run.map.ranks_of(node)[static_cast<size_t>(local)]);
  }
  switch (algorithm) {
    case Algorithm::Direct:
      return std::make_unique<RailDirect>(run.tcp, std::move(work));
    case Algorithm::Ring:
      return std::make_unique<RailRing>(run.tcp, std::move(work));
    case Algorithm::Whole:
    case Algorithm::Doubling:
      break;
  }
  throw Error(std::string(name_of(algorithm)) + " has no rails");
}

}  // namespace

void give_scratch(HierarchicalRun& run, Rail& rail) {
  const size_t slices = rail.slots() * rail.slice_bytes();
  std::byte* const memory = run.scratch.take(slices + rail.work_bytes());
  rail.use(memory, rail.slice_bytes(), memory + slices);
}

void reduce_long(HierarchicalRun& run, const Reducing& job, Algorithm algorithm) {
  NodeRounds& rounds = run.rounds;
  const size_t element = job.element();
  const RailSlices slices = choose_rails(
      {job.in.count(), element, size_of(job.travels), run.map.nodes(), run.rails, algorithm, run.plan.chunk_bytes});
  rounds.write().begin();
  rounds.note_use(job.in, element);
  if (job.out != nullptr && job.out != &job.in) rounds.note_use(*job.out, element);

  // A rank alone on its node shares its memory with all of the node's ranks, wherever it lies.
  const bool alone = rounds.size() == 1;
  Stages stages(run, job, slices);
  const bool published = job.out == &job.in && !alone && rounds.places().publish(job.in, element);
  if (!published && !alone) stages.copy_in(0);
  run.open({0, 0, 0, published ? 1U : 0U});
  const uint32_t in_heap = rounds.exchanged().in_heap;
  const std::unique_ptr<Rail> rail = make_rail(run, job, slices, algorithm);
  if (alone || (in_heap == static_cast<uint32_t>(rounds.size()) && !stages.helped())) {
    if (rail != nullptr) give_scratch(run, *rail);
    return reduce_in_place(run, job, slices, rail.get());
  }
  std::optional<HeapBuffers> buffers;
  if (in_heap == static_cast<uint32_t>(rounds.size())) {
    buffers.emplace(rounds.places(), rounds.rank(), rounds.size(), job.in, element);
    stages.read_from(*buffers);
  }
  rounds.places().forget();
  if (rail != nullptr) stages.give_memory(*rail);
  if (in_heap > 0) {
    // Only some ranks' data lies in the heap; or helpers will write where the ranks have published its places.
    stages.copy_in(0);
    run.sync();
  }
  reduce_staged(run, stages, rail.get());
}

}  // namespace ours::hierarchical
