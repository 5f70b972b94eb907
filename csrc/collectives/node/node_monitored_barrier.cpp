#include "collectives/monitored_barrier.h"
#include "collectives/node/node_algorithms.h"

// Each rank counts the monitored barriers that it has reached or, as rank 0, judged, where the others see it.

namespace ours::node {

namespace {

class Barrier final : public MonitoredBarrier {
 public:
  Barrier(NodeSession& session, Deadline deadline, uint32_t number)
      : MonitoredBarrier(session.rank(), session.size()), session_(session), deadline_(deadline), number_(number) {}

 protected:
  std::string describe(int rank) override { return session_.describe(rank); }
  std::string call_roll(const std::vector<int>& ranks) override { return session_.call_roll(ranks); }
  void announce() override { signal(session_.self().monitor); }
  void check() override { session_.failure().check(); }
  void fail(const std::string& message) override { session_.failure().fail(FailureKind::Timeout, message); }

  std::string await(int rank) override {
    const auto reached = [&] {
      // Acquire: what the peer did before the barrier is visible after it. Signed, because the counter wraps.
      const uint32_t count = session_.block(rank).monitor.value.load(std::memory_order_acquire);
      return static_cast<int32_t>(count - number_) >= 0;
    };
    bool given_up = false;
    Interrupts interrupts;
    wait_on(
        session_.block(rank).monitor, session_.wait_policy(), deadline_, [&] { return given_up || reached(); },
        [&] {
          given_up = session_.failure().failed() || session_.absence(rank) != nullptr || deadline_.passed();
          session_.check_interrupts(interrupts, [] { return std::string("monitored_barrier"); });
        });
    if (reached()) return "";
    const char* const why = session_.absence(rank);
    // What rank 0 has found out says more than that it has left since.
    if (rank == 0 && session_.failure().failed()) return session_.failure().message();
    return why == nullptr ? kLate : session_.describe(rank) + ' ' + why + session_.reason(rank);
  }

 private:
  NodeSession& session_;
  const Deadline deadline_;
  const uint32_t number_;
};

}  // namespace

void monitored_barrier(NodeSession& session, const Call& call, uint32_t number, bool wait_all_ranks) {
  session.failure().check();
  Barrier(session, call.deadline, number).run(call, wait_all_ranks);
}

}  // namespace ours::node
