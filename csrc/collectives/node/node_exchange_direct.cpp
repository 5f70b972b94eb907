#include <algorithm>

#include "collectives/node/node_algorithms.h"
#include "common/process_memory.h"

// The exchange of long messages without a copy into shared memory: every rank publishes the addresses of what it sends,
// and reads what it receives in the memory of its peers, if the system allows that. In the end all ranks wait for one
// another, so that nobody changes what a peer still reads.
//
// Whether a rank lends its memory is its own decision. If some do not, all messages take the other way.

namespace ours::node {

namespace {

/// Below, the second synchronisation and the system calls cost more than a second copy.
constexpr size_t kLong = size_t{256} << 10;

/// Where the table of a rank, after the sizes, says whether the rank lends; the addresses follow.
size_t flag_at(const NodeRounds& rounds) { return 2 * static_cast<size_t>(rounds.size()); }

bool is_long(const ExchangePlan& plan) {
  for (size_t r = 0; r < plan.sends.size(); ++r) {
    if (std::max(plan.sent(r), plan.received(r)) >= kLong) return true;
  }
  return false;
}

}  // namespace

bool DirectExchange::lend() {
  uint64_t* const table = rounds_.next_sizes();
  const size_t flag = flag_at(rounds_);
  table[flag] = 0;
  const auto me = static_cast<size_t>(rounds_.rank());
  if (!is_long(plan_) || !rounds_.session().reads_all(rounds_.rank()) || plan_.overwrites_sends(me)) return false;
  const bool common = plan_.is_common();
  bool checked = false;
  for (size_t r = 0; r < plan_.sends.size(); ++r) {
    if (r == me || !plan_.sends[r]) continue;
    if (!checked && !is_readable_by_others(plan_.sends[r]->data, plan_.sends[r]->bytes)) return false;
    checked = common;
    table[flag + 1 + r] = reinterpret_cast<uint64_t>(plan_.sends[r]->data);
  }
  table[flag] = 1;
  return true;
}

size_t DirectExchange::lenders() const {
  size_t lenders = 0;
  for (int r = 0; r < rounds_.size(); ++r) lenders += rounds_.sizes_of(r)[flag_at(rounds_)];
  return lenders;
}

void DirectExchange::run(const Running& run) {
  const auto ranks = static_cast<size_t>(rounds_.size());
  const auto me = static_cast<size_t>(rounds_.rank());
  const auto what = [&run] { return describe_record(run.record); };
  plan_.copy_own(me);
  // Each begins with the next rank, so that they do not all read the same memory at once.
  for (size_t i = 1; i < ranks; ++i) {
    const size_t from = (me + i) % ranks;
    if (plan_.received(from) == 0) continue;
    const uint64_t address = rounds_.sizes_of(static_cast<int>(from))[flag_at(rounds_) + 1 + me];
    rounds_.session().read(static_cast<int>(from), plan_.receives[from]->data, address, plan_.received(from), what);
  }
  rounds_.sync(run);
}

}  // namespace ours::node
