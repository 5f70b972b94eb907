#include "common/patrol.h"

#include <thread>

#include "support/ranks.h"
#include "support/testing.h"

namespace ours::testing {
namespace {

/// Things that are left for a thread, which counts them, and how often it has looked.
struct Place {
  Place() : thread([this] { run(); }) {}
  ~Place() {
    {
      const std::lock_guard<std::mutex> lock(mutex);
      ends = true;
    }
    wake.notify_all();
    thread.join();
  }

  void run() {
    std::unique_lock<std::mutex> lock(mutex);
    while (!ends) {
      patrol.sleep(
          wake, lock,
          [&] {
            ++looks;
            return ends || (left > 0 && patrol.is_due());
          },
          [&] { return left > 0; });
      seen += left;
      left = 0;
    }
  }

  /// Returns whether the thread had to be woken.
  bool leave() {
    const std::lock_guard<std::mutex> lock(mutex);
    ++left;
    if (patrol.leave()) return false;
    wake.notify_one();
    return true;
  }

  bool saw(int number) {
    const std::lock_guard<std::mutex> lock(mutex);
    return seen == number;
  }

  std::mutex mutex;
  std::condition_variable wake;
  Patrol patrol;
  int left = 0, seen = 0, looks = 0;
  bool ends = false;
  std::thread thread;
};

TEST(what_is_left_for_a_patrol_is_seen_without_waking_a_thread_each_time) {
  Place place;
  CHECK(place.leave());
  wait_until([&] { return place.saw(1); });
  int woken = 0;
  for (int i = 2; i <= 5; ++i) {
    woken += place.leave() ? 1 : 0;
    wait_until([&] { return place.saw(i); });
  }
  CHECK(woken < 4);  // it goes round for a second, unless this thread was stopped that long
}

TEST(a_patrol_knows_whether_it_looks_in_vain) {
  Place place;
  const auto read = [&](auto&& what) {
    const std::lock_guard<std::mutex> lock(place.mutex);
    return what();
  };
  const auto in_vain = [&] { return read([&] { return place.patrol.looks_in_vain(); }); };
  const auto looks = [&] { return read([&] { return place.looks; }); };
  const auto leave_and_take = [&] {
    if (!read([&] { return place.patrol.leave(); })) place.wake.notify_one();
  };
  place.leave();
  wait_until([&] { return place.saw(1); });
  leave_and_take();
  wait_until(in_vain);
  const int before = looks();
  place.leave();
  wait_until([&] { return place.saw(2); });
  CHECK(!in_vain());
  wait_until([&] { return looks() > before + 10; });
  CHECK(!in_vain());  // where nothing had been left
  leave_and_take();
  wait_until(in_vain);
  const std::lock_guard<std::mutex> lock(place.mutex);
  place.patrol.note_coming(std::chrono::hours(1));
  CHECK(place.patrol.looks_in_vain());
  place.patrol.note_coming(std::chrono::microseconds(0));
  CHECK(!place.patrol.looks_in_vain());
}

TEST(what_is_urgent_is_seen_before_the_next_round) {
  Patrol patrol;
  using std::chrono::hours;
  patrol.leave(hours(2));
  CHECK(!patrol.is_due());
  patrol.leave(std::chrono::microseconds(0), true);
  CHECK(patrol.is_due());
  patrol.leave(hours(2), true);
  CHECK(patrol.is_due());  // what lay there has not become less urgent
  patrol.leave(hours(2));
  CHECK(!patrol.is_due());  // somebody had seen to it
}

// It sleeps until a time that is too late.
TEST(a_thread_that_goes_round_is_woken_for_what_is_urgent) {
  Place place;
  place.leave();
  wait_until([&] { return place.saw(1); });
  const std::lock_guard<std::mutex> lock(place.mutex);
  CHECK(!place.patrol.leave(std::chrono::hours(-1)));
}

TEST(what_is_hurried_is_due) {
  Patrol patrol;
  CHECK(!patrol.leave());  // nobody looks
  patrol.hurry();
  CHECK(patrol.is_due());
}

}  // namespace
}  // namespace ours::testing
