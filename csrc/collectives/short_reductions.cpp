#include "collectives/short_reductions.h"

#include "collectives/partial_sums.h"
#include "collectives/sources.h"

namespace ours {

namespace {

constexpr uint16_t kFold = 0;
constexpr uint16_t kUnfold = 1;
constexpr uint16_t kFirstExchange = 2;

}  // namespace

void reduce_whole(const Members& members, const ShortArray& array, std::byte* all, void* result) {
  const size_t bytes = array.bytes();
  Tally sent, received;
  for (size_t i = 1; i < members.size(); ++i) {
    members.tcp.send({members.rank_at(members.place + i), 0, bytes}, all + members.place * bytes, sent);
  }
  for (size_t i = 1; i < members.size(); ++i) {
    const size_t from = (members.place + members.size() - i) % members.size();
    members.tcp.receive({members.rank_at(from), 0, bytes}, all + from * bytes, received);
  }
  members.wait([&] { return sent.complete() && received.complete(); });
  if (result == nullptr || array.count == 0) return;
  const auto ranks = static_cast<int>(members.size());
  Sources sources(ranks);
  for (size_t place = 0; place < members.size(); ++place) sources.data()[place] = all + place * bytes;
  reduce(result, sources.data(), ranks, array.count, array.dtype, array.reduction);
}

void reduce_by_doubling(const Members& members, const ShortArray& array, std::byte* mine, std::byte* theirs) {
  const size_t bytes = array.bytes();
  const size_t place = members.place;
  size_t power = 1;
  while (power * 2 <= members.size()) power *= 2;
  const size_t pairs = members.size() - power;

  const auto reduce_to_mine = [&](const void* const* sources, int number, const Reduction& how) {
    if (array.count != 0) reduce(mine, sources, number, array.count, array.dtype, how);
  };
  const auto reduce_one = [&](const Reduction& how) {
    const void* const only = mine;
    reduce_to_mine(&only, 1, how);
  };
  const Reduction sum = plain(array.reduction);
  if (array.reduction.kind == ReduceKind::PremulSum) reduce_one(array.reduction);

  Tally sent, received;
  const auto all_sent = [&] { return sent.complete(); };
  const auto all_received = [&] { return received.complete(); };
  const auto combine = [&](bool theirs_first) {
    const void* const sources[2] = {theirs_first ? theirs : mine, theirs_first ? mine : theirs};
    reduce_to_mine(sources, 2, sum);
  };

  TcpCall& tcp = members.tcp;
  const bool paired = place < 2 * pairs;
  if (paired && place % 2 == 0) {
    tcp.send({members.rank_at(place + 1), kFold, bytes}, mine, sent);
    members.wait(all_sent);
    tcp.receive({members.rank_at(place + 1), kUnfold, bytes}, mine, received);
    return members.wait(all_received);
  }
  if (paired) {
    tcp.receive({members.rank_at(place - 1), kFold, bytes}, theirs, received);
    members.wait(all_received);
    combine(true);
  }
  const size_t number = paired ? place / 2 : place - pairs;
  const auto place_of = [pairs](size_t n) { return n < pairs ? 2 * n + 1 : n + pairs; };
  uint16_t phase = kFirstExchange;
  for (size_t bit = 1; bit < power; bit *= 2, ++phase) {
    const int peer = members.rank_at(place_of(number ^ bit));
    tcp.send({peer, phase, bytes}, mine, sent);
    tcp.receive({peer, phase, bytes}, theirs, received);
    members.wait(all_received);
    // What is sent must not change on its way.
    members.wait(all_sent);
    combine((number & bit) != 0);
  }
  if (array.reduction.kind == ReduceKind::Avg) reduce_one(array.reduction);
  if (!paired) return;
  tcp.send({members.rank_at(place - 1), kUnfold, bytes}, mine, sent);
  members.wait(all_sent);
}

}  // namespace ours
