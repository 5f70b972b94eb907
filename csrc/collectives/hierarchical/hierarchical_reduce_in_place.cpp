#include "collectives/hierarchical/hierarchical_algorithms.h"
#include "collectives/partial_sums.h"

// Reduces long arrays that lie in the heap on all ranks of the node, or anywhere if the node has only one rank. A
// rail reads its slices of all buffers, and writes their results to all of them. No other rank reads or writes these
// slices, so the rail need not wait for its node until all are done.

namespace ours::hierarchical {

namespace {

/// A rail's work on the buffers of the node's ranks.
class Buffers {
 public:
  Buffers(NodeRounds& rounds, const Reducing& job)
      : rounds_(rounds),
        job_(job),
        element_(job.element()),
        all_(rounds.places(), rounds.rank(), rounds.size(), job.in, element_) {}

  void reduce(const Slice& slice, std::byte* to) {
    for (size_t at = slice.begin; at < slice.end;) {
      const size_t count = all_.find(at, slice.end);
      ours::reduce(to + (at - slice.begin) * element_, all_.sources(), rounds_.size(), count, job_.dtype,
                   within_node(job_.reduction, job_.travels));
      at += count;
    }
  }

  void write(const Slice& slice, const std::byte* from) {
    if (job_.out == nullptr) return;
    if (job_.out != &job_.in) {
      // Only a rank that is alone on its node gets here.
      return job_.out->copy_in(slice.begin, slice.end, from);
    }
    for (size_t at = slice.begin; at < slice.end;) {
      const size_t count = all_.find(at, slice.end);
      for (int r = 0; r < rounds_.size(); ++r) {
        rounds_.write().copy(all_.found(r), from + (at - slice.begin) * element_, count * element_);
      }
      at += count;
    }
  }

 private:
  NodeRounds& rounds_;
  const Reducing& job_;
  const size_t element_;
  HeapBuffers all_;
};

}  // namespace

void reduce_in_place(HierarchicalRun& run, const Reducing& job, const RailSlices& slices, Rail* rail) {
  if (rail == nullptr) return run.sync();
  Buffers buffers(run.rounds, job);
  const int local = run.map.local();
  size_t begun = 0, written = 0;
  const size_t chunks = slices.chunks;
  const auto can_write = [&] { return written < begun && rail->done(written); };
  const auto can_begin = [&] { return begun < chunks && begun < written + Rail::window() && rail->may_begin(); };
  while (written < chunks) {
    run.wait([&] {
      rail->advance();
      return can_write() || can_begin();
    });
    // Peers that have given up use their buffers again, so these must not be written.
    run.rounds.session().failure().check();
    if (can_write()) {
      buffers.write(slices.of(written, local), rail->slot(written));
      ++written;
    } else {
      buffers.reduce(slices.of(begun, local), rail->slot(begun));
      ++begun;
      rail->begin();
    }
  }
  run.sync();
}

}  // namespace ours::hierarchical
