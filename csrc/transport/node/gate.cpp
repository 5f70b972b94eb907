#include "transport/node/gate.h"

namespace ours {

bool GatePass::change(uint64_t& from, const Came& to) {
  // Acquire and release: who goes on reads what the other has published, and publishes it to those beyond.
  return gate_.came.compare_exchange_strong(from, to.word(), std::memory_order_acq_rel, std::memory_order_acquire);
}

bool GatePass::come(Shown* all, Gather gather) {
  uint64_t word = gate_.came.load(std::memory_order_acquire);
  if (first_.sides != Came::kBoth) {
    if (Came::of(word).number != first_.number && change(word, all == nullptr ? written_ : first_)) {
      if (all == nullptr) return false;
      gate_.first = *all;
      return finish(*all, gather);
    }
    const Came other = Came::of(word);
    if (all != nullptr && other.writing) {
      gate_.second = *all;
      if (change(word, {other.number, Came::kBoth, false, other.rank})) return false;
    }
    if (all != nullptr) gather(*all, gate_.first);
  }
  gate_.came.store(both_.word(), std::memory_order_release);
  return true;
}

bool GatePass::finish(Shown& all, Gather gather) {
  uint64_t word = first_.word();
  if (change(word, written_)) return false;
  gather(all, gate_.second);
  return true;
}

}  // namespace ours
