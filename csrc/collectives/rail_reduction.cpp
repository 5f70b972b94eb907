#include "collectives/rail_reduction.h"

#include <algorithm>

namespace ours {

namespace {

constexpr size_t kLine = 64;

size_t whole_lines(size_t bytes) { return (bytes + kLine - 1) / kLine * kLine; }

}  // namespace

Reduction within_node(const Reduction& reduction) {
  Reduction result = reduction;
  // Divided once, in the end.
  if (reduction.kind == ReduceKind::Avg) result.kind = ReduceKind::Sum;
  return result;
}

Reduction between_nodes(const Reduction& reduction) {
  Reduction result = reduction;
  // Multiplied already.
  if (reduction.kind == ReduceKind::PremulSum) result.kind = ReduceKind::Sum;
  return result;
}

RailReduction::RailReduction(TcpCall& tcp, Job job)
    : tcp_(tcp),
      job_(std::move(job)),
      element_(size_of(job_.dtype)),
      chunks_(job_.slices.chunks()),
      slots_(std::max<size_t>(1, std::min(chunks_, window()))),
      slice_bytes_(whole_lines(job_.slices.longest() * element_)),
      part_bytes_(whole_lines(part_of(0, 0).size() * element_)),
      slot_bytes_(slice_bytes_ + (nodes() - 1) * part_bytes_),
      states_(slots_) {}

Slice RailReduction::part_of(size_t chunk, size_t node) const {
  return slice_of(job_.slices.of(chunk, job_.rail).size(), static_cast<int>(nodes()), static_cast<int>(node),
                  job_.slices.align);
}

TcpCall::Message RailReduction::message(size_t node, size_t chunk, bool result, size_t elements) const {
  const auto phase = static_cast<uint16_t>(2 * chunk + (result ? 1 : 0));
  return {job_.peers[node], phase, elements * element_, 0, static_cast<uint32_t>(chunk)};
}

std::byte* RailReduction::input(size_t chunk, size_t node) const {
  const auto me = static_cast<size_t>(job_.node);
  return slot(chunk) + slice_bytes_ + (node < me ? node : node - 1) * part_bytes_;
}

void RailReduction::tick() {
  if (next_ < chunks_) exchange_parts(next_);
  if (next_ >= kLag && next_ - kLag < chunks_) reduce_part(next_ - kLag);
  ++next_;
}

void RailReduction::drain() {
  while (next_ >= chunks_ && next_ < chunks_ + kLag && may_tick()) tick();
}

bool RailReduction::done(size_t chunk) const {
  if (next_ <= chunk + kLag) return false;
  const State& now = state(chunk);
  return now.results == now.to_get && now.sent == now.to_send;
}

void RailReduction::exchange_parts(size_t chunk) {
  const auto me = static_cast<size_t>(job_.node);
  State& now = state(chunk) = State{};
  // Beginning with the next node: not all send to the same one at the same time.
  for (size_t i = 1; i < nodes(); ++i) {
    const size_t to = (me + i) % nodes();
    const Slice part = part_of(chunk, to);
    const TcpCall::Message parts = message(to, chunk, false, part.size());
    tcp_.send(parts, slot(chunk) + part.begin * element_, &now.sent);
    now.to_send += tcp_.parts(parts.bytes);
  }
  const size_t mine = part_of(chunk, me).size();
  for (size_t i = 1; i < nodes(); ++i) {
    const size_t from = (me + i) % nodes();
    const TcpCall::Message parts = message(from, chunk, false, mine);
    tcp_.receive(parts, input(chunk, from), &now.arrived);
    now.to_arrive += tcp_.parts(parts.bytes);
  }
}

void RailReduction::reduce_part(size_t chunk) {
  const auto me = static_cast<size_t>(job_.node);
  State& now = state(chunk);
  const Slice mine = part_of(chunk, me);
  std::byte* const result = slot(chunk) + mine.begin * element_;
  std::vector<const void*> sources(nodes());
  for (size_t node = 0; node < nodes(); ++node) sources[node] = node == me ? result : input(chunk, node);
  if (!mine.empty()) {
    reduce(result, sources.data(), static_cast<int>(nodes()), mine.size(), job_.dtype, job_.reduction);
  }
  for (size_t i = 1; i < nodes(); ++i) {
    const size_t to = (me + i) % nodes();
    if (!reads(to)) continue;
    const TcpCall::Message results = message(to, chunk, true, mine.size());
    tcp_.send(results, result, &now.sent);
    now.to_send += tcp_.parts(results.bytes);
  }
  for (size_t i = 1; i < nodes() && reads(me); ++i) {
    const size_t from = (me + i) % nodes();
    const Slice part = part_of(chunk, from);
    const TcpCall::Message results = message(from, chunk, true, part.size());
    tcp_.receive(results, slot(chunk) + part.begin * element_, &now.results);
    now.to_get += tcp_.parts(results.bytes);
  }
}

}  // namespace ours
