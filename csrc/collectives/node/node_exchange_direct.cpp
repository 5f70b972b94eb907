#include "collectives/node/node_algorithms.h"
#include "common/process_memory.h"

// The exchange of long messages without a copy into shared memory: every rank publishes the addresses of what it sends,
// and reads what it receives in the memory of its peers, if the system allows that. In the end all ranks wait for one
// another, so that nobody changes what a peer still reads.
//
// If some ranks do not lend their memory, all messages take the other way.

namespace ours::node {

bool DirectExchange::lend() {
  uint64_t* const own = rounds_.next_addresses();
  const auto me = static_cast<size_t>(rounds_.rank());
  if (plan_.longest(me) < LendChoice::kLeastMoved || !rounds_.session().reads_all(rounds_.rank()) ||
      plan_.overwrites_sends(me))
    return false;
  const bool common = plan_.is_common();
  bool added = false;
  ReadableByOthers readable;
  for (size_t r = 0; r < plan_.sends.size(); ++r) {
    if (r == me || !plan_.sends[r]) continue;
    if (!added || !common) readable.add(plan_.sends[r]->data, plan_.sends[r]->bytes);
    added = true;
    own[r] = reinterpret_cast<uint64_t>(plan_.sends[r]->data);
  }
  return readable.all();
}

void DirectExchange::run(const Running& run) {
  const auto ranks = static_cast<size_t>(rounds_.size());
  const auto me = static_cast<size_t>(rounds_.rank());
  const auto what = [&run] { return describe_record(run.record); };
  // Each begins with the next rank, so that they do not all read the same memory at once.
  for (size_t i = 1; i < ranks; ++i) {
    const size_t from = (me + i) % ranks;
    if (plan_.received(from) == 0) continue;
    const uint64_t address = rounds_.addresses_of(static_cast<int>(from))[me];
    rounds_.session().read(static_cast<int>(from), plan_.receives[from]->data, address, plan_.received(from), what);
  }
  // Copied last, since nothing that comes lies over it: a rank where it would does not lend.
  rounds_.sync(run, [&] { plan_.copy_own(me); });
}

}  // namespace ours::node
