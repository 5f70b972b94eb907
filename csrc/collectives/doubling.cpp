#include "collectives/doubling.h"

#include "collectives/partial_sums.h"

namespace ours {

namespace {

constexpr uint16_t kFold = 0;
constexpr uint16_t kUnfold = 1;
constexpr uint16_t kFirstExchange = 2;

}  // namespace

void Doubling::reduce(std::byte* mine, std::byte* theirs, size_t count, DType dtype, const Reduction& reduction,
                      const Wait& wait) {
  const size_t bytes = count * size_of(dtype);
  int power = 1;
  while (power * 2 <= size()) power *= 2;
  const int pairs = size() - power;

  const auto reduce_one = [&](const Reduction& how) {
    const void* const only = mine;
    if (count != 0) ours::reduce(mine, &only, 1, count, dtype, how);
  };
  const Reduction sum = plain(reduction);
  if (reduction.kind == ReduceKind::PremulSum) reduce_one(reduction);

  Tally sent, received;
  const auto all_sent = [&] { return sent.complete(); };
  const auto all_received = [&] { return received.complete(); };
  const auto combine = [&](bool theirs_first) {
    const void* const sources[2] = {theirs_first ? theirs : mine, theirs_first ? mine : theirs};
    if (count != 0) ours::reduce(mine, sources, 2, count, dtype, sum);
  };

  const bool paired = place_ < 2 * pairs;
  if (paired && place_ % 2 == 0) {
    tcp_.send({rank_of(place_ + 1), kFold, bytes}, mine, sent);
    wait(all_sent);
    tcp_.receive({rank_of(place_ + 1), kUnfold, bytes}, mine, received);
    return wait(all_received);
  }
  if (paired) {
    tcp_.receive({rank_of(place_ - 1), kFold, bytes}, theirs, received);
    wait(all_received);
    combine(true);
  }
  const int number = paired ? place_ / 2 : place_ - pairs;
  const auto place_of = [pairs](int n) { return n < pairs ? 2 * n + 1 : n + pairs; };
  uint16_t phase = kFirstExchange;
  for (int bit = 1; bit < power; bit *= 2, ++phase) {
    const int peer = rank_of(place_of(number ^ bit));
    tcp_.send({peer, phase, bytes}, mine, sent);
    tcp_.receive({peer, phase, bytes}, theirs, received);
    wait(all_received);
    // What is sent must not change on its way.
    wait(all_sent);
    combine((number & bit) != 0);
  }
  if (reduction.kind == ReduceKind::Avg) reduce_one(reduction);
  if (!paired) return;
  tcp_.send({rank_of(place_ - 1), kUnfold, bytes}, mine, sent);
  wait(all_sent);
}

}  // namespace ours
