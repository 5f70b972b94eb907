#include <cstring>

#include "collectives/tcp_group_impl.h"

// Small reductions among many ranks, in log2(P) exchanges (Thakur, Rabenseifner and Gropp 2005, "Optimization of
// collective communication operations in MPICH"): in step k, ranks whose numbers differ in bit k exchange what they
// have and both reduce it. Where P is no power of two, the first ranks are paired before: the even one of a pair gives
// its input to the odd one, and gets the result in the end.
//
// Both ranks of an exchange put the lower one's value first, so they compute the same bits; hence all ranks do. The
// order is that of a tree: (x0 + x1) + (x2 + x3).

namespace ours {

namespace {

constexpr uint16_t kFold = 0;
constexpr uint16_t kUnfold = 1;
constexpr uint16_t kFirstExchange = 2;

}  // namespace

void TcpGroup::reduce_doubling(TcpCall& tcp, DType dtype, const Reduction& reduction, const std::byte* in,
                               std::byte* out, size_t count) {
  const size_t bytes = count * size_of(dtype);
  int power = 1;
  while (power * 2 <= size()) power *= 2;
  const int pairs = size() - power;

  std::byte* const mine = scratch(2 * bytes);
  std::byte* const theirs = mine + bytes;
  if (bytes != 0) std::memcpy(mine, in, bytes);
  Reduction sum = reduction;
  if (reduction.kind == ReduceKind::PremulSum) {
    const void* const only = mine;
    ours::reduce(mine, &only, 1, count, dtype, reduction);
    sum.kind = ReduceKind::Sum;
  }
  if (reduction.kind == ReduceKind::Avg) sum.kind = ReduceKind::Sum;

  const size_t parts = tcp.parts(bytes);
  const auto wait = [&](const size_t* counted) { tcp.run([counted, parts] { return *counted == parts; }); };
  const auto combine = [&](bool theirs_first) {
    const void* const sources[2] = {theirs_first ? theirs : mine, theirs_first ? mine : theirs};
    ours::reduce(mine, sources, 2, count, dtype, sum);
  };

  const bool paired = rank() < 2 * pairs;
  size_t sent = 0, received = 0;
  if (paired && rank() % 2 == 0) {
    tcp.send({rank() + 1, kFold, bytes}, mine, &sent);
    wait(&sent);
    tcp.receive({rank() + 1, kUnfold, bytes}, theirs, &received);
    wait(&received);
    if (bytes != 0) std::memcpy(out, theirs, bytes);
    return;
  }
  if (paired) {
    tcp.receive({rank() - 1, kFold, bytes}, theirs, &received);
    wait(&received);
    combine(true);
  }
  const int number = paired ? rank() / 2 : rank() - pairs;
  const auto rank_of = [pairs](int n) { return n < pairs ? 2 * n + 1 : n + pairs; };
  uint16_t phase = kFirstExchange;
  for (int bit = 1; bit < power; bit *= 2, ++phase) {
    const int peer = rank_of(number ^ bit);
    sent = received = 0;
    tcp.send({peer, phase, bytes}, mine, &sent);
    tcp.receive({peer, phase, bytes}, theirs, &received);
    wait(&received);
    // What is sent must not change on its way.
    wait(&sent);
    combine((number & bit) != 0);
  }
  if (reduction.kind == ReduceKind::Avg) {
    const void* const only = mine;
    ours::reduce(mine, &only, 1, count, dtype, reduction);
  }
  sent = 0;
  if (paired) {
    tcp.send({rank() - 1, kUnfold, bytes}, mine, &sent);
    wait(&sent);
  }
  if (bytes != 0) std::memcpy(out, mine, bytes);
}

}  // namespace ours
