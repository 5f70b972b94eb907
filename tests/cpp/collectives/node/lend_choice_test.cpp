#include "collectives/node/lend_choice.h"

#include "support/testing.h"

namespace ours::testing {
namespace {

using std::chrono::microseconds;

/// A first rank that makes calls of `kBytes`.
struct FirstRank {
  static constexpr size_t kBytes = LendChoice::kLeastReduced;
  LendChoice choice{LendChoice::kLeastReduced};

  /// Returns how many of them lent memory, if each takes `staged` or `lent`, and every fourth is interrupted.
  int call(int times, microseconds staged, microseconds lent) {
    int lends = 0;
    for (int i = 0; i < times; ++i) {
      const bool now = choice.lends(kBytes);
      choice.hear(kBytes, choice.next(kBytes));
      choice.took(kBytes, now, (now ? lent : staged) * (i % 4 == 3 ? 50 : 1));
      lends += now ? 1 : 0;
    }
    return lends;
  }
};

TEST(lending_is_tried_and_chosen_where_it_is_faster) {
  FirstRank rank;
  CHECK_EQ(rank.call(4, microseconds(900), microseconds(500)), 2);
  CHECK(rank.call(1000, microseconds(900), microseconds(500)) >= 970);
  // Another processor, or other neighbours.
  CHECK(rank.call(1000, microseconds(900), microseconds(2000)) <= 200);
  CHECK(rank.call(1000, microseconds(900), microseconds(2000)) <= 20);
  CHECK(rank.call(1000, microseconds(900), microseconds(500)) >= 500);
}

TEST(a_way_is_tried_more_rarely_the_slower_it_is) {
  FirstRank equal, slow;
  const int tries = equal.call(1000, microseconds(500), microseconds(501));
  CHECK(tries >= 15 && tries <= 25);
  CHECK(slow.call(1000, microseconds(500), microseconds(5000)) <= 6);
}

TEST(lending_is_chosen_by_size) {
  FirstRank rank;
  rank.call(100, microseconds(900), microseconds(500));
  CHECK(rank.choice.lends(FirstRank::kBytes));
  CHECK(rank.choice.lends(2 * FirstRank::kBytes - 1));
  CHECK(!rank.choice.lends(2 * FirstRank::kBytes));
  CHECK(!rank.choice.lends(FirstRank::kBytes - 1));
  CHECK(!rank.choice.lends(SIZE_MAX));
  rank.choice.hear(SIZE_MAX, true);
  CHECK(rank.choice.lends(SIZE_MAX) && rank.choice.lends(size_t{1} << 40));
}

}  // namespace
}  // namespace ours::testing
