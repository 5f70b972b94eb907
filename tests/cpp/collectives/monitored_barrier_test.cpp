#include "collectives/monitored_barrier.h"

#include "common/error.h"
#include "support/testing.h"

namespace ours::testing {
namespace {

/// Rank 0's part of a barrier in which no other rank arrives.
class Deserted final : public MonitoredBarrier {
 public:
  using MonitoredBarrier::MonitoredBarrier;

 private:
  std::string describe(int rank) override { return "rank " + std::to_string(rank); }
  void announce() override { throw Error("not all have arrived"); }
  std::string await(int) override { return kLate; }
  void check() override {}
  void fail(const std::string&) override {}
};

TEST(a_monitored_barrier_names_all_missing_ranks_however_many_there_are) {
  const Call call{Op::MonitoredBarrier, DType::UInt8, 1, Deadline::after(std::chrono::hours(1))};
  const std::string message = CHECK_THROWS(TimeoutError, Deserted(0, 40).run(call, true));
  std::string ranks = "Ranks 1";
  for (int r = 2; r < 40; ++r) ranks += ", " + std::to_string(r);
  CHECK(message.find(ranks + " failed to pass") != std::string::npos);
  CHECK(message.find("; rank 39 did not arrive") != std::string::npos);
}

}  // namespace
}  // namespace ours::testing
