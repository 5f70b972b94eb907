#include "transport/node/node_barrier.h"

#include "common/listed.h"
#include "common/timeline.h"

namespace ours {

void NodeBarrier::arrive() {
  session_.failure().check();
  ++epoch_;
  // The store inside signal() is also the release of everything published.
  signal(session_.self().arrival[parity()].number, epoch_);
}

void NodeBarrier::await(Deadline deadline, uint64_t call, const std::function<std::string()>& what) {
  Interrupts interrupts;
  Awaited awaited;
  const timeline::Phase phase("wait for peers");
  for (int r = 0; r < session_.size(); ++r) {
    if (r == session_.rank()) continue;
    wait_on(
        session_.block(r).arrival[parity()].number, session_.wait_policy(), deadline,
        [&] { return arrived(r, epoch_); },
        [&] {
          look_around(deadline, call, what, awaited);
          session_.check_interrupts(interrupts, what);
        });
  }
}

bool NodeBarrier::arrived(int rank, uint32_t number) const {
  // Acquire, because what the peer published is read next; sequentially consistent for HeapPlaces::withdraw(). The
  // difference is signed because the counters wrap.
  const uint32_t last = session_.block(rank).arrival[number & 1].number.value.load(std::memory_order_seq_cst);
  return static_cast<int32_t>(last - number) >= 0;
}

bool NodeBarrier::all_arrived(uint32_t number) const {
  for (int r = 0; r < session_.size(); ++r) {
    if (!arrived(r, number)) return false;
  }
  return true;
}

void NodeBarrier::look_around(Deadline deadline, uint64_t call, const std::function<std::string()>& what,
                              Awaited& awaited) {
  session_.failure().check();
  // All absent ranks, not only the one awaited first: it may be busy for long while another has died.
  std::vector<int> absent;
  for (int r = 0; r < session_.size(); ++r) {
    if (arrived(r, epoch_)) continue;
    const std::string refusal = session_.refusal(r, call);
    if (!refusal.empty()) session_.failure().raise(FailureKind::Mismatch, refusal);
    const char* why = session_.absence(r);
    // The rank may have arrived, and then ended, since we last looked.
    if (why != nullptr && !arrived(r, epoch_)) session_.lost(r, why, what());
    absent.push_back(r);
  }
  if (absent.empty()) return;
  if (session_.lookout() != nullptr) session_.lookout()->look_around(absent);
  const auto names = [&] { return listed(absent, [this](int r) { return session_.describe(r); }); };
  if (session_.lookout() == nullptr && Clock::now() >= deadline.half()) awaited.set(names());
  if (!deadline.passed()) return;
  const Culprits culprits = session_.lookout() != nullptr ? session_.lookout()->culprits(absent)
                                                          : Culprits{names(), session_.call_roll(absent)};
  session_.failure().raise(FailureKind::Timeout,
                           timed_out(what(), deadline, session_.describe(session_.rank()), culprits));
}

}  // namespace ours
