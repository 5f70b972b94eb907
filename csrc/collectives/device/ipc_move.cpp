#include <algorithm>

#include "collectives/device/device_opening.h"
#include "collectives/device/ipc_group.h"

// The collectives that move data unchanged work as in shared memory (node_exchange.cpp): each rank has bytes for some
// ranks, either the same for all of them or different ones, one after the other in its slot. In round k the slots
// hold piece k of all messages; the readers copy it to where it belongs, while each rank copies piece k + 1 into its
// next slot.
//
// In the first synchronisation, all ranks tell how many bytes they send to each rank and expect from it, and compare
// all of these tables. Hence all know how many rounds there are, and where in a peer's slot their pieces lie. A
// message that fits into a slot takes no other synchronisation.

namespace ours {

void IpcGroup::do_exchange(const Running& run, const ExchangePlan& plan) {
  const auto ranks = static_cast<size_t>(size());
  const auto me = static_cast<size_t>(rank());
  const size_t window = plan.is_common() ? slot_bytes_ : std::max<size_t>(slot_bytes_ / ranks, 1);
  // The pieces k that a rank sends lie in this order; if they are equal, there is only one.
  const auto copy_in = [&](size_t k) {
    std::byte* to = slot(rank(), k);
    for (size_t d = 0; d < ranks; ++d) {
      const Slice piece = piece_of(plan.sent(d), window, k);
      if (d == me || piece.empty()) continue;
      copy(to, static_cast<const std::byte*>(plan.sends[d]->data) + piece.begin, piece.size());
      if (plan.is_common()) break;
      to += piece.size();
    }
  };
  copy_in(0);
  wait_copied(run);
  const std::vector<Words> tables = open_call(host(), run, table_of(plan));
  const size_t rounds = std::max<size_t>(piece_count(check_tables(tables, run.record), window), 1);

  const auto copy_out = [&](size_t k) {
    // Each begins with the next rank, so that they do not all read from the same device at once.
    for (size_t i = 1; i < ranks; ++i) {
      const size_t s = (me + i) % ranks;
      const Slice piece = piece_of(plan.received(s), window, k);
      if (piece.empty()) continue;
      size_t before = 0;
      for (size_t d = 0; !plan.is_common() && d < me; ++d) {
        if (d != s) before += piece_of(tables[s][d], window, k).size();
      }
      copy(static_cast<std::byte*>(plan.receives[s]->data) + piece.begin, slot(static_cast<int>(s), k) + before,
           piece.size());
    }
  };
  const auto& own = plan.sends[me];
  if (own && plan.receives[me] && own->data != plan.receives[me]->data) {
    copy(plan.receives[me]->data, own->data, own->bytes);
  }
  for (size_t k = 0; k < rounds; ++k) {
    copy_out(k);
    if (k + 1 < rounds) copy_in(k + 1);
    wait_copied(run);
    // All ranks have copied piece k out and piece k + 1 into their slots.
    if (k + 1 < rounds) host().barrier(run.call);
  }
  end_call(rounds);
}

}  // namespace ours
