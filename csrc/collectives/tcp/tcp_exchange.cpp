#include <algorithm>
#include <cstring>

#include "collectives/tcp/dissemination.h"
#include "collectives/tcp/tcp_algorithms.h"
#include "common/partition.h"

// The collectives that move data unchanged between pairs of ranks: gather, scatter, all_to_all, and all_gather among
// few ranks. Every rank sends at once to all that it has something for, beginning with the next rank, so that they do
// not all send to the same one. Each message goes directly from its owner to its reader: no byte travels twice.
//
// If any rank does not get as much as it expects, no rank may have written anything. So a rank first looks at the
// headers of all messages that come to it, leaving the data where it is. Then all confirm by a dissemination that they
// found what they expected, and only then is the data read. If every rank sees every other's header, and all say that
// they send and expect the same size everywhere, there is nothing to confirm.

namespace ours::tcp {

namespace {

/// The sender sends to all ranks, and expects from all, as much as this message is long.
constexpr uint8_t kUniform = 1;
/// The round in which ranks say that they have begun, before those in which they confirm.
constexpr uint32_t kBegun = 0;
constexpr uint32_t kConfirming = 1;

}  // namespace

void exchange(TcpRun& run, const ExchangePlan& plan) {
  const auto ranks = static_cast<size_t>(run.size);
  const auto me = static_cast<size_t>(run.rank);
  const auto& own = plan.sends[me];
  const bool uniform = own && plan.is_uniform(own->bytes);
  if (ranks > 1) run.tcp.agree(kBegun, static_cast<int>((me + 1) % ranks));
  Tally sent, received;
  struct Source {
    int rank;
    Span span;
  };
  std::vector<Source> sources;
  for (size_t i = 1; i < ranks; ++i) {
    const size_t to = (me + i) % ranks;
    const size_t from = (me + ranks - i) % ranks;
    if (const auto& span = plan.receives[from]) sources.push_back({static_cast<int>(from), *span});
    if (const auto& span = plan.sends[to]) {
      const void* data = span->data;
      if (plan.overlaps(to)) {
        // What comes from that rank goes to the same memory, and may arrive before this has been sent.
        std::byte* const copy = run.tcp.keep(span->bytes);
        std::memcpy(copy, data, span->bytes);
        data = copy;
      }
      run.tcp.send({static_cast<int>(to), 0, span->bytes, uniform ? kUniform : uint8_t{0}}, data, sent);
    }
  }

  bool begun = ranks == 1;
  std::vector<Source> unseen = sources;
  // No receive is posted yet, which would tell for whom this rank waits.
  for (const Source& from : unseen) run.tcp.expect(from.rank, true);
  bool all_uniform = uniform;
  const auto look = [&](const Source& from) {
    const FrameHeader* header = run.tcp.next_from(from.rank);
    if (header == nullptr) return false;
    run.tcp.expect(from.rank, false);
    all_uniform = all_uniform && header->detail == kUniform;
    if (header->total == from.span.bytes) return true;
    run.tcp.mismatch(sizes_disagree(run.tcp.describe(from.rank), header->total, run.tcp.describe(run.rank),
                                    from.span.bytes, run.running.record));
  };
  run.tcp.run([&] {
    begun = begun || run.tcp.agreed(kBegun, static_cast<int>((me + ranks - 1) % ranks));
    unseen.erase(std::remove_if(unseen.begin(), unseen.end(), look), unseen.end());
    return begun && unseen.empty();
  });
  if (!all_uniform) {
    Dissemination confirmed(run.members(), kConfirming);
    run.tcp.run([&] { return confirmed.advance(); });
  }

  for (const Source& from : sources) {
    run.tcp.receive({from.rank, 0, from.span.bytes}, from.span.data, received);
  }
  plan.copy_own(me);
  run.tcp.run([&] { return sent.complete() && received.complete(); });
}

}  // namespace ours::tcp
