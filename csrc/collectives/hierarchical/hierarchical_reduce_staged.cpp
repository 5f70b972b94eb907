#include <algorithm>

#include "collectives/hierarchical/hierarchical_stages.h"
#include "collectives/node/node_algorithms.h"
#include "collectives/partial_sums.h"

// Long arrays through the node's stages.
//
// In round q, between two synchronisations, this rank reduces its portion of what round q - 1 staged, hands a chunk's
// slice to its rail once it is complete, copies results out that were published in round q - 1, stages the next
// portion, and publishes its results of the round `delay` before, for which the rail has had the time of several
// chunks. If a rail's slots are where its results are read, publishing copies nothing; then there is one slot more than
// chunks under way, since the others read one while the next is filled.

namespace ours::hierarchical {

Stages::Stages(HierarchicalRun& run, const Reducing& job, const RailSlices& slices)
    : run_(run), node_(run.rounds), local_(run.map.local()), job_(job), slices_(slices), element_(size_of(job.dtype)) {
  const NodeLayout& layout = node_.session().layout();
  const size_t window = std::min(layout.chunk_bytes / static_cast<size_t>(slices.rails), layout.result_bytes());
  window_ = std::max<size_t>(window / kCacheLine * kCacheLine / element_, 1);
  rounds_ = std::max<size_t>(piece_count(slices.longest(), window_), 1);
  shown_ = slices.longest() * element_ <= layout.result_bytes();
}

void Stages::give_memory(Rail& rail) {
  if (!shown_) return hierarchical::give_scratch(run_, rail);
  static_assert(Rail::most_slots() <= NodeLayout::kResults);
  node_.reserve(rail.slots());
  rail.use(node_.result(local_, 0), node_.session().layout().result_bytes(), run_.scratch.take(rail.work_bytes()));
}

void Stages::copy_in(size_t round) {
  std::byte* const stage = node_.next_stage();
  for (int rail = 0; rail < slices_.rails; ++rail) {
    if (rail == local_) continue;
    const Slice part = portion(round, rail);
    std::byte* const to = stage + static_cast<size_t>(rail) * window_ * element_;
    node_.copy(job_.in, part, to, element_);
  }
}

void Stages::reduce(size_t round, std::byte* slot) {
  const Slice part = portion(round, local_);
  std::byte* const to = slot + offset_of(round, local_);
  const int ranks = node_.size();
  Sources sources(ranks);
  const size_t window = static_cast<size_t>(local_) * window_;
  job_.in.visit(part.begin, part.end, [&](std::byte* data, size_t at, size_t n) {
    for (int r = 0; r < ranks; ++r) {
      sources.data()[r] = node_.stage_of(r) + (window + at) * element_;
    }
    sources.data()[local_] = data;
    ours::reduce(to + at * element_, sources.data(), ranks, n, job_.dtype, within_node(job_.reduction, job_.travels));
  });
}

void Stages::publish(size_t round, const std::byte* slot) {
  if (shown_) return;
  node_.write().copy(node_.next_result(), slot + offset_of(round, local_), portion(round, local_).size() * element_);
}

void Stages::copy_out(size_t round) {
  if (job_.out == nullptr) return;
  const size_t total = job_.in.count() * element_;
  for (int rail = 0; rail < slices_.rails; ++rail) {
    const Slice part = portion(round, rail);
    const std::byte* const from = results_of(round, rail);
    job_.out->visit(part.begin, part.end, [&](std::byte* data, size_t at, size_t n) {
      node::copy_result(data, from + at * element_, n * element_, total);
    });
  }
}

const std::byte* Stages::results_of(size_t round, int rail) const {
  if (!shown_) return node_.result_of(rail);
  // Numbered as the rail numbers its slots.
  return node_.result(rail, round / rounds_ % Rail::most_slots()) + offset_of(round, rail);
}

Slice Stages::portion(size_t round, int rail) const {
  const Slice slice = slices_.of(round / rounds_, rail);
  const Slice part = piece_of(slice.size(), window_, round % rounds_);
  return {slice.begin + part.begin, slice.begin + part.end};
}

size_t Stages::offset_of(size_t round, int rail) const {
  return (portion(round, rail).begin - slices_.of(round / rounds_, rail).begin) * element_;
}

void reduce_staged(HierarchicalRun& run, Stages& stages, Rail* rail) {
  const size_t rounds = stages.rounds();
  const size_t all = stages.all_rounds();
  const size_t chunks = stages.slices().chunks();
  const size_t delay = std::min(Rail::window() - 1, chunks - 1) * rounds + rounds - 1;
  for (size_t round = 0;; ++round) {
    if (round > 0) run.sync();
    if (rail != nullptr && round < all) {
      const size_t chunk = round / rounds;
      stages.reduce(round, rail->slot(chunk));
      if (round % rounds == rounds - 1) {
        run.wait([&] {
          rail->advance();
          return rail->may_begin();
        });
        rail->begin();
        run.push();
      }
    }
    if (round > delay) stages.copy_out(round - delay - 1);
    if (round == all + delay) return;
    if (round + 1 < all) stages.copy_in(round + 1);
    if (rail != nullptr && round >= delay) {
      const size_t ready = round - delay;
      run.wait([&] {
        rail->advance();
        return rail->done(ready / rounds);
      });
      stages.publish(ready, rail->slot(ready / rounds));
    }
  }
}

}  // namespace ours::hierarchical
