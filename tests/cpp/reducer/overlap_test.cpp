#include "reducer/overlap.h"

#include "support/testing.h"

namespace ours::testing {
namespace {

using Times = std::vector<int64_t>;

BackwardTimes backward(int64_t compute_ended, const Times& launched, const Times& ended) {
  BackwardTimes times;
  times.compute_ended = compute_ended;
  times.buckets.resize(launched.size());
  for (size_t i = 0; i < launched.size(); ++i) {
    times.buckets[i].launched = times.buckets[i].reduction_began = launched[i];
    times.buckets[i].reduction_ended = ended[i];
  }
  return times;
}

TEST(each_bucket_is_charged_for_the_time_that_it_adds) {
  const auto exposed = [](const Times& launched, const Times& ended) {
    return exposed_times(backward(100, launched, ended));
  };
  // All have ended when the computation does.
  CHECK(exposed({10, 20, 30}, {15, 25, 90}) == (Times{0, 0, 0}));
  // One ends after the other.
  CHECK(exposed({10, 20, 30}, {50, 110, 150}) == (Times{0, 10, 40}));
  // The second one had ended before the first.
  CHECK(exposed({10, 90, 100}, {150, 120, 180}) == (Times{50, 0, 30}));
  // The second one is launched after the computation: the pause before it is no communication.
  CHECK(exposed({10, 130, 140}, {20, 150, 145}) == (Times{0, 20, 0}));
  // The second one was skipped.
  CHECK(exposed({10, -1, 100}, {20, -1, 130}) == (Times{0, 0, 30}));
  CHECK(exposed({}, {}).empty());
}

TEST(reductions_at_the_same_time_count_once) {
  const auto busy = [](const Times& began, const Times& ended) { return busy_time(backward(100, began, ended)); };
  CHECK_EQ(busy({10, 20}, {15, 30}), 15);
  CHECK_EQ(busy({10, 12, 40}, {30, 20, 50}), 30);
  CHECK_EQ(busy({10, 12}, {30, 35}), 25);
  CHECK_EQ(busy({20, 10, -1}, {25, 15, -1}), 10);
  CHECK_EQ(busy({}, {}), 0);
}

}  // namespace
}  // namespace ours::testing
