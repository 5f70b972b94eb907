#include "transport/node/node_barrier.h"

#include <algorithm>

#include "common/listed.h"
#include "common/timeline.h"

namespace ours {

namespace {

/// Gate::came, taken apart.
struct Came {
  uint32_t number;
  uint16_t many;
  uint16_t last;

  static Came of(uint64_t word) {
    return {static_cast<uint32_t>(word >> 32), static_cast<uint16_t>(word >> 16), static_cast<uint16_t>(word)};
  }
  uint64_t word() const { return uint64_t{number} << 32 | uint32_t{many} << 16 | last; }
};

}  // namespace

NodeBarrier::NodeBarrier(NodeSession& session)
    : session_(session), tree_(static_cast<size_t>(session.size())), gates_{&session.gate(0, 0), &session.gate(0, 1)} {}

void NodeBarrier::arrive(Gather gather) {
  session_.failure().check();
  ++epoch_;
  // Sequentially consistent for Places::withdraw().
  session_.self().arrival[parity()].number.store(epoch_, std::memory_order_seq_cst);
  auto member = static_cast<size_t>(session_.rank());
  Gate* left = nullptr;
  for (size_t level = 0;; ++level) {
    const GateTree::Group group = tree_.group(level, member);
    Gate& here = gate(group.gate);
    const bool last = come(here, group.size);
    if (left != nullptr) left->passed.value.store(epoch_, std::memory_order_relaxed);
    if (!last) return;
    for (size_t i = 0; i < group.size && gather != nullptr; ++i) {
      const size_t at = group.first + i;
      const Shown& one = level == 0 ? session_.block(static_cast<int>(at)).arrival[parity()].shown
                                    : gate(tree_.gate(level - 1, at)).shown;
      if (i == 0) {
        here.shown = one;
      } else {
        gather(here.shown, one);
      }
    }
    if (level + 1 == tree_.levels()) return signal(here.passed, epoch_);
    left = &here;
    member /= GateTree::kWidth;
  }
}

bool NodeBarrier::come(Gate& gate, size_t size) {
  const auto rank = static_cast<uint16_t>(session_.rank());
  uint64_t word = gate.came.load(std::memory_order_relaxed);
  Came now{};
  do {
    const Came before = Came::of(word);
    const int others = before.number == epoch_ ? before.many : 0;
    now = {epoch_, static_cast<uint16_t>(others + 1), rank};
    // Acquire and release: the last to come reads what the others published, and publishes it to those beyond.
  } while (!gate.came.compare_exchange_weak(word, now.word(), std::memory_order_acq_rel, std::memory_order_relaxed));
  return now.many == size;
}

void NodeBarrier::await(Deadline deadline, uint64_t call, const std::function<std::string()>& what) {
  Interrupts interrupts;
  Awaited awaited;
  const timeline::Phase phase("wait for peers");
  wait_on(
      last_gate().passed, session_.wait_policy(), deadline, [this] { return is_open(); },
      [&] {
        look_around(deadline, call, what, awaited);
        session_.check_interrupts(interrupts, what);
      });
}

bool NodeBarrier::has_passed(const Gate& gate) const {
  // Acquire, because what the peers published is read next. The difference is signed because the counters wrap.
  return static_cast<int32_t>(gate.passed.value.load(std::memory_order_acquire) - epoch_) >= 0;
}

bool NodeBarrier::arrived(int rank, uint32_t number) const {
  // Sequentially consistent for Places::withdraw().
  const uint32_t last = session_.block(rank).arrival[number & 1].number.load(std::memory_order_seq_cst);
  return static_cast<int32_t>(last - number) >= 0;
}

bool NodeBarrier::all_arrived(uint32_t number) const {
  for (int r = 0; r < session_.size(); ++r) {
    if (!arrived(r, number)) return false;
  }
  return true;
}

std::vector<int> NodeBarrier::awaited() const {
  std::vector<int> ranks;
  for (int r = 0; r < session_.size(); ++r) {
    if (!arrived(r, epoch_)) ranks.push_back(r);
  }
  for (size_t level = 0; level < tree_.levels(); ++level) {
    for (size_t first = 0; first < tree_.members(level); first += GateTree::kWidth) {
      const GateTree::Group group = tree_.group(level, first);
      const Came came = Came::of(gate(group.gate).came.load(std::memory_order_acquire));
      const bool all = came.number == epoch_ && came.many == group.size;
      if (all && !has_passed(gate(group.gate))) ranks.push_back(came.last);
    }
  }
  std::sort(ranks.begin(), ranks.end());
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
