#include <algorithm>
#include <cstring>

#include "collectives/hierarchical/hierarchical_stages.h"
#include "collectives/node/node_algorithms.h"
#include "collectives/partial_sums.h"

// Long arrays through the node's stages.
//
// In round q, between two synchronisations, this rank reduces its part of what round q - 1 staged, hands a chunk's
// slice to its rail once it is complete, copies results out that were published in round q - 1, stages the next
// portion, and publishes its results of the round `delay` before, for which the rail has had the time of several
// chunks. If a rail's slots are where its results are read, publishing copies nothing; then there is one slot more than
// chunks under way, since the others read one while the next is filled.
//
// Where there are fewer rails than ranks, the others help: they reduce parts of the rails' slices, which the rails
// collect in round q + 1.

namespace ours::hierarchical {

Stages::Stages(HierarchicalRun& run, const Reducing& job, const RailSlices& slices)
    : run_(run),
      node_(run.rounds),
      local_(run.map.local()),
      job_(job),
      slices_(slices),
      element_(size_of(job.dtype)),
      team_(node_.size() / slices.rails) {
  const NodeLayout& layout = node_.session().layout();
  const auto team = static_cast<size_t>(team_);
  const size_t fits = std::min(layout.chunk_bytes / (static_cast<size_t>(slices.rails) * team), layout.result_bytes());
  part_ = std::max<size_t>(fits / kCacheLine * kCacheLine / element_, 1);
  rounds_ = std::max<size_t>(piece_count(slices.longest(), team * part_), 1);
  // All rounds are equally long, so that every member has something to do in the last one.
  const size_t even = piece_count(slices.longest(), rounds_ * team);
  part_ = std::min(part_, std::max<size_t>(piece_count(even, slices.align) * slices.align, 1));
  shown_ = !helped() && slices.longest() * element_ <= layout.result_bytes();
}

void Stages::give_memory(Rail& rail) {
  if (!shown_) return hierarchical::give_scratch(run_, rail);
  static_assert(Rail::most_slots() <= NodeLayout::kResults);
  node_.reserve(rail.slots());
  rail.use(node_.result(local_, 0), node_.session().layout().result_bytes(), run_.scratch.take(rail.work_bytes()));
}

void Stages::copy_in(size_t round) {
  if (buffers_ != nullptr) return;
  std::byte* const stage = node_.next_stage();
  for (int rail = 0; rail < slices_.rails; ++rail) {
    for (int member = 0; member < team_; ++member) {
      if (rank_of(rail, member) == local_) continue;
      node_.copy(job_.in, part(round, rail, member), stage + place_of(rail, member), element_);
    }
  }
}

void Stages::reduce(size_t round, Rail* rail) {
  if (!has_part()) return;
  const int mine = local_ % slices_.rails, member = local_ / slices_.rails;
  const Slice all = part(round, mine, member);
  const size_t place = place_of(mine, member);
  std::byte* const to =
      helped() ? node_.own_stage() + place : rail->slot(round / rounds_) + offset_of(round, mine, all);
  const int ranks = node_.size();
  const Reduction inside = within_node(job_.reduction, job_.travels);
  if (buffers_ != nullptr) {
    for (size_t at = all.begin; at < all.end;) {
      const size_t count = buffers_->find(at, all.end);
      ours::reduce(to + (at - all.begin) * element_, buffers_->sources(), ranks, count, job_.dtype, inside);
      at += count;
    }
    return;
  }
  Sources sources(ranks);
  job_.in.visit(all.begin, all.end, [&](std::byte* data, size_t at, size_t n) {
    for (int r = 0; r < ranks; ++r) sources.data()[r] = node_.stage_of(r) + place + at * element_;
    sources.data()[local_] = data;
    ours::reduce(to + at * element_, sources.data(), ranks, n, job_.dtype, inside);
  });
}

void Stages::collect(size_t round, std::byte* slot) {
  for (int member = 0; member < team_; ++member) {
    const Slice all = part(round, local_, member);
    const std::byte* const from = node_.stage_before(rank_of(local_, member)) + place_of(local_, member);
    if (!all.empty()) std::memcpy(slot + offset_of(round, local_, all), from, all.size() * element_);
  }
}

void Stages::publish(size_t round, const std::byte* slot) {
  if (shown_) return;
  for (int member = 0; member < team_; ++member) {
    const Slice all = part(round, local_, member);
    const std::byte* const from = slot + offset_of(round, local_, all);
    node_.write().copy(node_.next_result_of(rank_of(local_, member)), from, all.size() * element_);
  }
}

void Stages::copy_out(size_t round) {
  if (job_.out == nullptr) return;
  const bool leaves = node::leaves_cache(job_.in.count() * element_, node_.size());
  for (int rail = 0; rail < slices_.rails; ++rail) {
    for (int member = 0; member < team_; ++member) {
      const Slice all = part(round, rail, member);
      const std::byte* const from = results_of(round, rail, member);
      job_.out->visit(all.begin, all.end, [&](std::byte* data, size_t at, size_t n) {
        node::copy_result(data, from + at * element_, n * element_, leaves);
      });
    }
  }
}

const std::byte* Stages::results_of(size_t round, int rail, int member) const {
  if (!shown_) return node_.result_of(rank_of(rail, member));
  // Numbered as the rail numbers its slots.
  return node_.result(rail, round / rounds_ % Rail::most_slots()) + offset_of(round, rail, portion(round, rail));
}

Slice Stages::portion(size_t round, int rail) const {
  const Slice slice = slices_.of(round / rounds_, rail);
  const Slice some = piece_of(slice.size(), static_cast<size_t>(team_) * part_, round % rounds_);
  return {slice.begin + some.begin, slice.begin + some.end};
}

Slice Stages::part(size_t round, int rail, int member) const {
  const Slice all = portion(round, rail);
  const Slice some = piece_of(all.size(), part_, static_cast<size_t>(member));
  return {all.begin + some.begin, all.begin + some.end};
}

size_t Stages::offset_of(size_t round, int rail, const Slice& elements) const {
  return (elements.begin - slices_.of(round / rounds_, rail).begin) * element_;
}

size_t Stages::place_of(int rail, int member) const {
  return static_cast<size_t>(rail * team_ + member) * part_ * element_;
}

void reduce_staged(HierarchicalRun& run, Stages& stages, Rail* rail) {
  const size_t rounds = stages.rounds();
  const size_t all = stages.all_rounds();
  const size_t chunks = stages.slices().chunks;
  const size_t late = stages.helped() ? 1 : 0;
  const size_t delay = std::min(Rail::window() - 1, chunks - 1) * rounds + rounds - 1 + late;
  const auto begin = [&](size_t round) {
    if (round % rounds != rounds - 1) return;
    run.wait([&] {
      rail->advance();
      return rail->may_begin();
    });
    rail->begin();
    run.push();
  };
  for (size_t round = 0;; ++round) {
    if (round > 0) run.sync();
    if (rail != nullptr && late == 1 && round >= 1 && round <= all) {
      stages.collect(round - 1, rail->slot((round - 1) / rounds));
      begin(round - 1);
    }
    if (round < all) {
      stages.reduce(round, rail);
      if (rail != nullptr && late == 0) begin(round);
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
