#include "transport/node/node_barrier.h"

#include <algorithm>

#include "common/listed.h"
#include "common/timeline.h"

namespace ours {

namespace {

/// The bit of a member of a level, of the two that come to its gate (see Came).
uint8_t side_of(size_t member) { return static_cast<uint8_t>(1U << (member & 1)); }

}  // namespace

NodeBarrier::NodeBarrier(NodeSession& session, Gather gather)
    : session_(session),
      gather_(gather),
      tree_(static_cast<size_t>(session.size())),
      gates_{&session.gate(0, 0), &session.gate(0, 1)} {}

void NodeBarrier::arrive(const Shown* shows) {
  session_.failure().check();
  ++epoch_;
  // Sequentially consistent for Places::withdraw().
  session_.self().arrival[parity()].number.store(epoch_, std::memory_order_seq_cst);
  Shown all = shows == nullptr ? Shown{} : *shows;
  const auto rank = static_cast<uint16_t>(session_.rank());
  auto member = static_cast<size_t>(rank);
  for (size_t level = 0; level < tree_.levels(); ++level, member /= 2) {
    const uint8_t side = tree_.is_alone(level, member) ? Came::kBoth : side_of(member);
    GatePass pass(gate(tree_.gate_of(level, member)), epoch_, rank, side);
    if (!pass.come(shows == nullptr ? nullptr : &all, gather_)) return;
  }
  Opening& opening = session_.opening(parity());
  if (shows != nullptr) opening.shown = all;
  signal(opening.passed, epoch_);
}

void NodeBarrier::await(Deadline deadline, uint64_t call, const std::function<std::string()>& what) {
  Interrupts interrupts;
  Awaited awaited;
  const timeline::Phase phase("wait for peers");
  wait_on(
      session_.opening(parity()).passed, session_.wait_policy(), deadline, [this] { return is_open(); },
      [&] {
        look_around(deadline, call, what, awaited);
        session_.check_interrupts(interrupts, what);
      });
}

bool NodeBarrier::is_open() const {
  // Acquire, because what the peers published is read next. The difference is signed because the counters wrap.
  const uint32_t passed = session_.opening(parity()).passed.value.load(std::memory_order_acquire);
  return static_cast<int32_t>(passed - epoch_) >= 0;
}

bool NodeBarrier::all_arrived(uint32_t number) const {
  for (int r = 0; r < session_.size(); ++r) {
    // Sequentially consistent for Places::withdraw().
    const uint32_t last = session_.block(r).arrival[number & 1].number.load(std::memory_order_seq_cst);
    if (static_cast<int32_t>(last - number) < 0) return false;
  }
  return true;
}

Came NodeBarrier::came(size_t gate) const {
  const Came last = Came::of(this->gate(gate).came.load(std::memory_order_acquire));
  return last.number == epoch_ ? last : Came{epoch_, 0, false, 0};
}

std::vector<int> NodeBarrier::awaited() const {
  std::vector<int> ranks;
  for (size_t level = 0; level < tree_.levels(); ++level) {
    for (size_t member = 0; member < tree_.members(level); ++member) {
      const Came here = came(tree_.gate_of(level, member));
      if ((here.sides & side_of(member)) != 0) {
        if (here.writing) ranks.push_back(here.rank);
      } else if (level == 0) {
        ranks.push_back(static_cast<int>(member));
      } else {
        const Came below = came(tree_.gate_that_is(level, member));
        if (below.sides == Came::kBoth) ranks.push_back(below.rank);
      }
    }
  }
  const Came last = came(tree_.last_gate());
  if (last.sides == Came::kBoth && !is_open()) ranks.push_back(last.rank);
  std::sort(ranks.begin(), ranks.end());
  // A rank that goes on meanwhile is found twice.
  ranks.erase(std::unique(ranks.begin(), ranks.end()), ranks.end());
  return ranks;
}

void NodeBarrier::look_around(Deadline deadline, uint64_t call, const std::function<std::string()>& what,
                              Awaited& awaited) {
  session_.failure().check();
  // All of them, not only one: it may be busy for long while another has died.
  const std::vector<int> absent = this->awaited();
  for (const int r : absent) {
    const std::string refusal = session_.refusal(r, call);
    if (!refusal.empty()) session_.failure().raise(FailureKind::Mismatch, refusal);
    const char* why = session_.absence(r);
    if (why == nullptr) continue;
    // The rank may have arrived and gone on, and then ended, since we looked.
    const std::vector<int> still = this->awaited();
    if (std::find(still.begin(), still.end(), r) != still.end()) session_.lost(r, why, what());
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
