#include "transport/arrivals.h"

#include "support/testing.h"

namespace ours::testing {
namespace {

using std::chrono::hours;
using std::chrono::microseconds;
using std::chrono::minutes;

TEST(of_several_reports_of_an_arrival_the_earliest_holds) {
  Arrivals arrivals(3);
  arrivals.begin(0);
  CHECK_EQ(arrivals.last(), 0);
  CHECK_EQ(arrivals.last(0), -1);
  arrivals.note(2, 70);
  arrivals.note(2, 50);
  arrivals.note(2, 60);
  CHECK_EQ(arrivals.last(), 2);
  CHECK_EQ(arrivals.at(2), int64_t{50});
  CHECK_EQ(arrivals.last(2), 0);
}

// Another rank called long before or after this one, and the half of the clock that ranks write down has begun anew.
TEST(times_of_other_ranks_are_right_over_an_hour) {
  const Clock::time_point now(hours(100) + microseconds(7));
  for (const minutes before : {minutes(0), minutes(1), minutes(40), minutes(70)}) {
    for (const minutes own : {minutes(0), minutes(1), minutes(40), minutes(70)}) {
      const auto written = static_cast<uint32_t>(steady_us(now - before));
      CHECK_EQ(SinceCall(now - own, now)(written), int64_t{microseconds(own - before).count()});
    }
  }
}

}  // namespace
}  // namespace ours::testing
