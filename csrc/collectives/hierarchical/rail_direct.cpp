#include "collectives/hierarchical/rail_direct.h"

#include <algorithm>

#include "kernels/convert.h"

namespace ours {

namespace {

/// How many elements are converted at a time: as many as stay in the fastest cache.
constexpr size_t kConverted = 1024;

}  // namespace

RailDirect::RailDirect(TcpCall& tcp, Job job)
    : Rail(tcp, std::move(job)),
      travelling_element_(size_of(job_.travels)),
      part_bytes_(whole_lines(part_of(0, 0).size() * travelling_element_)),
      travelling_bytes_(converts() ? whole_lines(job_.slices.longest() * travelling_element_) : 0),
      states_(slots_),
      widened_(converts() ? nodes() * kConverted : 0) {
  slot_work_bytes_ = (nodes() - 1) * part_bytes_ + travelling_bytes_;
}

TcpCall::Message RailDirect::message(size_t node, size_t chunk, bool result, size_t elements) const {
  const auto phase = static_cast<uint16_t>(2 * chunk + (result ? 1 : 0));
  return {job_.peers[node], phase, elements * travelling_element_, 0, static_cast<uint32_t>(chunk)};
}

std::byte* RailDirect::input(size_t chunk, size_t node) const {
  const auto me = static_cast<size_t>(job_.node);
  return work(chunk) + (node < me ? node : node - 1) * part_bytes_;
}

void RailDirect::tick() {
  if (next_ < chunks_) exchange_parts(next_);
  if (next_ >= kLag && next_ - kLag < chunks_) reduce_part(next_ - kLag);
  ++next_;
}

void RailDirect::advance() {
  // While chunks are still to come, begin() does this.
  while (next_ >= chunks_ && next_ < chunks_ + kLag && may_tick()) tick();
}

bool RailDirect::done(size_t chunk) {
  if (next_ <= chunk + kLag) return false;
  State& now = state(chunk);
  if (!now.results.complete() || !now.sent.complete()) return false;
  if (converts() && !now.widened) {
    widen(reinterpret_cast<float*>(slot(chunk)), travelling(chunk), job_.travels,
          job_.slices.of(chunk, job_.rail).size());
    now.widened = true;
  }
  return true;
}

void RailDirect::exchange_parts(size_t chunk) {
  const auto me = static_cast<size_t>(job_.node);
  State& now = state(chunk) = State{};
  // Each begins with the next node, so that they do not all send to the same one at once.
  for (size_t i = 1; i < nodes(); ++i) {
    const size_t to = (me + i) % nodes();
    const Slice part = part_of(chunk, to);
    std::byte* const data = travelling(chunk) + part.begin * travelling_element_;
    if (converts()) {
      narrow(data, reinterpret_cast<const float*>(slot(chunk)) + part.begin, job_.travels, part.size());
    }
    tcp_.send(message(to, chunk, false, part.size()), data, now.sent);
  }
  const size_t mine = part_of(chunk, me).size();
  for (size_t i = 1; i < nodes(); ++i) {
    const size_t from = (me + i) % nodes();
    tcp_.receive(message(from, chunk, false, mine), input(chunk, from), now.arrived);
  }
}

void RailDirect::reduce_part(size_t chunk) {
  const auto me = static_cast<size_t>(job_.node);
  State& now = state(chunk);
  const Slice mine = part_of(chunk, me);
  std::byte* const result = travelling(chunk) + mine.begin * travelling_element_;
  if (converts()) {
    reduce_converting(chunk, mine);
  } else if (!mine.empty()) {
    std::vector<const void*> sources(nodes());
    for (size_t node = 0; node < nodes(); ++node) sources[node] = node == me ? result : input(chunk, node);
    reduce(result, sources.data(), static_cast<int>(nodes()), mine.size(), job_.dtype, job_.reduction);
  }
  for (size_t i = 1; i < nodes(); ++i) {
    const size_t to = (me + i) % nodes();
    if (reads(to)) tcp_.send(message(to, chunk, true, mine.size()), result, now.sent);
  }
  for (size_t i = 1; i < nodes() && reads(me); ++i) {
    const size_t from = (me + i) % nodes();
    const Slice part = part_of(chunk, from);
    std::byte* const data = travelling(chunk) + part.begin * travelling_element_;
    tcp_.receive(message(from, chunk, true, part.size()), data, now.results);
  }
}

void RailDirect::reduce_converting(size_t chunk, const Slice& mine) {
  const auto me = static_cast<size_t>(job_.node);
  float* const own = reinterpret_cast<float*>(slot(chunk)) + mine.begin;
  std::byte* const result = travelling(chunk) + mine.begin * travelling_element_;
  std::vector<const void*> sources(nodes());
  for (size_t at = 0; at < mine.size(); at += kConverted) {
    const size_t count = std::min(kConverted, mine.size() - at);
    for (size_t node = 0; node < nodes(); ++node) {
      float* const wide = widened_.data() + node * kConverted;
      if (node != me) widen(wide, input(chunk, node) + at * travelling_element_, job_.travels, count);
      sources[node] = node == me ? own + at : wide;
    }
    reduce(own + at, sources.data(), static_cast<int>(nodes()), count, job_.dtype, job_.reduction);
    narrow(result + at * travelling_element_, own + at, job_.travels, count);
  }
}

}  // namespace ours
