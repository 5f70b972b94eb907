#include "collectives/straggler_ledger.h"

#include "support/testing.h"

namespace ours::testing {
namespace {

/// A program whose times are given in milliseconds since it began, on rank 0 of three.
class Program {
 public:
  /// A call that this rank makes at `called` and the others at the other times, and that ends at `ended`.
  void call(int called, int of_1, int of_2, int ended) {
    Arrivals& arrivals = ledger.begin();
    arrivals.note(1, int64_t{1000} * (of_1 - called));
    arrivals.note(2, int64_t{1000} * (of_2 - called));
    ledger.add({at(called), at(ended), 4});
  }
  /// The program waits while `others` more calls are under way.
  void wait(int time, uint64_t others = 0) {
    ledger.waited(std::chrono::milliseconds(time), ledger.total().calls + others);
  }
  int64_t late(size_t rank) const { return ledger.total().late[rank] / 1000; }

  StragglerLedger ledger{0, 3};

 private:
  static Clock::time_point at(int ms) {
    return Clock::time_point(std::chrono::hours(1)) + std::chrono::milliseconds(ms);
  }
};

TEST(waiting_for_the_last_rank_costs_its_distance_from_the_others) {
  Program program;
  program.call(10, 17, 12, 18);
  program.wait(8);
  program.call(28, 28, 33, 34);
  program.wait(6);
  CHECK_EQ(program.late(0), 0);
  CHECK_EQ(program.late(1), 5);
  CHECK_EQ(program.late(2), 5);
  const StragglerTally total = program.ledger.total();
  CHECK_EQ(total.calls, uint64_t{2});
  CHECK_EQ(total.bytes, uint64_t{8});
  CHECK_EQ(total.elapsed, int64_t{24'000});
  CHECK_EQ(total.blocked, int64_t{14'000});
  CHECK_EQ(total.last[1], uint64_t{1});
  CHECK_EQ(total.last[2], uint64_t{1});
}

TEST(a_rank_behind_in_all_calls_of_a_step_costs_its_delay_once) {
  Program program;
  // Rank 1 is 5 ms late from the first of three calls on, for which the program waits at the end.
  program.call(10, 15, 10, 16);
  program.call(20, 25, 20, 26);
  program.call(30, 35, 30, 36);
  program.wait(6);
  CHECK_EQ(program.late(1), 5);
}

// This rank begins each step 50 ms late. It makes two calls 10 ms apart, and waits for the first while the second is
// under way.
TEST(own_delays_of_calls_that_overlap_count_once) {
  Program program;
  program.call(0, 0, 0, 0);
  for (int step = 100; step < 400; step += 100) {
    program.call(step + 50, step, step, step + 51);
    program.wait(0, 1);
    program.call(step + 60, step + 10, step + 10, step + 61);
    program.wait(1);
  }
  CHECK_EQ(program.late(0), 150);
}

// It cost the others that time, but is not part of what this rank's statistics are about.
TEST(what_a_rank_did_before_its_first_call_is_not_counted) {
  Program program;
  program.call(60'000, 0, 10, 60'001);
  program.wait(1);
  CHECK_EQ(program.late(0), 0);
  program.call(60'040, 60'020, 60'030, 60'041);
  CHECK_EQ(program.ledger.total().elapsed, int64_t{41'000});
  program.wait(1);
  CHECK_EQ(program.late(0), 10);
}

TEST(a_late_rank_counts_its_own_delays_although_it_waits_for_nobody) {
  Program program;
  program.call(0, 0, 0, 0);
  for (int step = 0; step < 3; ++step) {
    program.call(50 * step + 40, 50 * step, 50 * step, 50 * step + 45);
    program.wait(0);
  }
  CHECK_EQ(program.late(0), 120);
  CHECK_EQ(program.late(1), 0);
}

TEST(what_computation_hides_costs_nothing) {
  Program program;
  program.call(10, 15, 10, 16);
  // The program computes until 20, and finds the collective done; rank 1 has caught up.
  program.call(20, 20, 20, 21);
  program.wait(1);
  CHECK_EQ(program.late(1), 0);
  // And here it waits for some of it.
  program.call(30, 35, 30, 36);
  program.wait(2);
  CHECK_EQ(program.late(1), 2);
}

TEST(a_rank_that_slows_down_little_by_little_costs_all_of_it) {
  Program program;
  program.call(10, 12, 10, 13);
  program.call(20, 24, 20, 25);
  program.call(30, 36, 30, 37);
  program.wait(7);
  CHECK_EQ(program.late(1), 6);
}

TEST(this_rank_holds_up_the_others_although_it_never_waits_for_itself) {
  Program program;
  program.call(0, 0, 0, 0);
  program.call(20, 12, 10, 21);
  program.wait(1);
  CHECK_EQ(program.late(0), 8);
}

TEST(calls_of_which_nothing_is_known_blame_nobody) {
  StragglerLedger ledger(0, 3);
  ledger.begin();
  ledger.add({Clock::now(), Clock::now(), 4});
  const StragglerTally total = ledger.total();
  CHECK_EQ(total.calls, uint64_t{1});
  for (size_t r = 0; r < 3; ++r) CHECK_EQ(total.last[r] + static_cast<uint64_t>(total.late[r]), uint64_t{0});
}

TEST(the_recent_part_leaves_out_what_is_over_a_minute_old) {
  Program program;
  program.call(0, 500, 0, 501);
  program.wait(501);
  for (int second = 10; second <= 100; second += 10)
    program.call(second * 1000, second * 1000, second * 1000, second * 1000 + 1);
  const StragglerTally recent = program.ledger.recent();
  CHECK_EQ(recent.late[1], int64_t{0});
  CHECK(recent.elapsed >= 30'000'000 && recent.elapsed <= 70'000'000);
  CHECK_EQ(program.ledger.total().late[1], int64_t{500'000});
}

}  // namespace
}  // namespace ours::testing
