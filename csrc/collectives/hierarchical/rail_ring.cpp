#include "collectives/hierarchical/rail_ring.h"

#include "collectives/partial_sums.h"

namespace ours {

RailRing::RailRing(TcpCall& tcp, Job job)
    : Rail(tcp, std::move(job)),
      part_bytes_(whole_lines(part_of(0, 0).size() * element_)),
      // Spread so that a chunk's last step comes before the first one of the chunk that begins when it is done.
      stagger_(piece_count(steps(), std::min(slots_, window()))),
      partial_(plain(job_.reduction)),
      states_(slots_) {
  slot_work_bytes_ = 2 * part_bytes_;
}

void RailRing::next(Place& place) const {
  ++place.chunk;
  if (place.chunk < chunks_ && place.chunk * stagger_ <= place.tick) return;
  // The first chunk that has steps left; it has begun, since chunks overlap.
  ++place.tick;
  place.chunk = place.tick < steps() ? 0 : (place.tick - steps()) / stagger_ + 1;
}

size_t RailRing::sent_part(size_t step) const {
  const auto me = static_cast<size_t>(job_.node);
  // Partial sums go around once, and then the results.
  return (me + 2 * nodes() - 1 - step) % nodes();
}

TcpCall::Message RailRing::message(int peer, size_t chunk, size_t step, size_t part) const {
  const auto number = static_cast<uint16_t>(chunk * steps() + step);
  return {peer, number, part_of(chunk, part).size() * element_, 0, static_cast<uint32_t>(chunk + step)};
}

std::byte* RailRing::incoming(size_t chunk, size_t step) const {
  if (reduces(step)) return work(chunk) + (step % 2) * part_bytes_;
  return slot(chunk) + part_of(chunk, received_part(step)).begin * element_;
}

void RailRing::begin() {
  state(begun_) = State{};
  ++begun_;
  advance();
}

void RailRing::advance() {
  while (true) {
    const bool posted = post();
    const bool taken = take();
    const bool sent = send();
    if (!posted && !taken && !sent) return;
  }
}

bool RailRing::post() {
  const auto from = static_cast<size_t>(job_.node) + nodes() - 1;
  const int before = job_.peers[from % nodes()];
  bool moved = false;
  for (; !over(posting_) && posting_.chunk < begun_; next(posting_), moved = true) {
    State& now = state(posting_.chunk);
    const size_t step = step_of(posting_);
    // The data of the step before the last has been added up, so its place is free.
    if (step >= 2 && now.taken < step - 1) return moved;
    tcp_.receive(message(before, posting_.chunk, step, received_part(step)), incoming(posting_.chunk, step),
                 now.arrived[step % 2]);
    ++now.posted;
  }
  return moved;
}

bool RailRing::take() {
  bool moved = false;
  for (; !over(taking_) && taking_.chunk < begun_; next(taking_), moved = true) {
    State& now = state(taking_.chunk);
    const size_t step = step_of(taking_);
    const Slice part = part_of(taking_.chunk, received_part(step));
    if (now.posted <= step || !now.arrived[step % 2].complete()) return moved;
    if (reduces(step) && !part.empty()) {
      std::byte* const own = slot(taking_.chunk) + part.begin * element_;
      const void* const sources[2] = {incoming(taking_.chunk, step), own};
      const bool last = step + 1 == nodes() - 1;
      reduce(own, sources, 2, part.size(), job_.dtype, last ? job_.reduction : partial_);
    }
    ++now.taken;
  }
  return moved;
}

bool RailRing::send() {
  const int after = job_.peers[(static_cast<size_t>(job_.node) + 1) % nodes()];
  bool moved = false;
  for (; !over(sending_) && sending_.chunk < begun_; next(sending_), moved = true) {
    State& now = state(sending_.chunk);
    const size_t step = step_of(sending_);
    if (now.taken < step) return moved;
    const Slice part = part_of(sending_.chunk, sent_part(step));
    tcp_.send(message(after, sending_.chunk, step, sent_part(step)), slot(sending_.chunk) + part.begin * element_,
              now.sent);
    ++now.passed_on;
  }
  return moved;
}

bool RailRing::done(size_t chunk) {
  if (begun_ <= chunk) return false;
  const State& now = state(chunk);
  return now.taken == steps() && now.passed_on == steps() && now.sent.complete();
}

}  // namespace ours
