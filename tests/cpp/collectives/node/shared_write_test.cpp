#include "collectives/node/shared_write.h"

#include <algorithm>
#include <cstdint>
#include <thread>
#include <vector>

#include "support/node_ranks.h"

namespace ours::testing {
namespace {

using std::chrono::microseconds;

constexpr size_t kPiece = WriteTimes::kTimedBytes;

/// One rank on its own, writing a piece every 100 us that costs what `cached` and `around` say; the first piece that
/// goes another way than the one before costs the more of them. Returns how many of them went around the cache.
struct Writer {
  WriteTimes times;
  Clock::time_point now{};
  bool went_before = false;

  int write(int pieces, microseconds cached, microseconds around) {
    int went_around = 0;
    for (int i = 0; i < pieces; ++i) {
      now += microseconds(100);
      const bool goes_around = times.next(times.around_is_faster(), now);
      const auto cost = goes_around ? around : cached;
      times.took(kPiece, goes_around == went_before ? cost : std::max(around, cached));
      went_before = goes_around;
      went_around += goes_around ? 1 : 0;
    }
    return went_around;
  }
};

TEST(shared_writes_take_the_faster_way_and_follow_its_changes) {
  Writer writer;
  // Under one cache both cost the same: the cache is used, except for a try now and then.
  const int tries = writer.write(1000, microseconds(10), microseconds(9));
  CHECK(!writer.times.around_is_faster());
  CHECK(tries >= 40 && tries <= 120);
  // The cores move apart, and together again.
  CHECK(writer.write(1000, microseconds(40), microseconds(9)) >= 800);
  CHECK(writer.times.around_is_faster());
  CHECK(writer.write(1000, microseconds(10), microseconds(9)) <= 200);
  CHECK(!writer.times.around_is_faster());
}

TEST(shared_writes_are_not_misled_by_interruptions) {
  WriteTimes times;
  Clock::time_point now{};
  for (int i = 0; i < 2000; ++i) {
    now += microseconds(100);
    const bool around = times.next(false, now);
    // Three of four pieces are interrupted.
    times.took(kPiece, i % 4 != 0 ? microseconds(3000) : microseconds(around ? 9 : 10));
    CHECK(!times.around_is_faster());
  }
}

TEST(shared_writes_of_few_bytes_tell_nothing) {
  WriteTimes times;
  Clock::time_point now{};
  for (int i = 0; i < 1000; ++i) {
    now += microseconds(100);
    CHECK(!times.next(false, now));
    times.took(kPiece - 1, microseconds(1));
  }
}

TEST(a_timed_write_takes_the_way_that_is_set_or_tries_both) {
  const auto count_around = [](Setting setting, size_t bytes) {
    WriteTimes times;
    int around = 0;
    const auto write = [&](bool goes_around) {
      const auto cost = goes_around ? microseconds(10) : microseconds(2000);
      for (const auto end = Clock::now() + cost; Clock::now() < end;) std::this_thread::yield();
      around += goes_around ? 1 : 0;
    };
    for (int i = 0; i < 20; ++i) times.time(setting, times.around_is_faster(), bytes, write);
    return around;
  };
  CHECK_EQ(count_around(Setting::On, kPiece), 20);
  CHECK_EQ(count_around(Setting::Off, kPiece), 0);
  CHECK_EQ(count_around(Setting::On, kPiece - 1), 0);
  CHECK(count_around(Setting::Auto, kPiece) > 0);
}

TEST(shared_writes_of_all_ranks_go_the_way_that_one_of_them_wants) {
  run_sessions(3, 4096, [](std::shared_ptr<NodeSession> session) {
    SharedWrite automatic(*session, Setting::Auto);
    SharedWrite cached(*session, Setting::Off);
    SharedWrite around(*session, Setting::On);
    NodeGroup group(session);
    uint64_t seq = 0;
    for (const bool wanted : {false, true, false}) {
      if (session->rank() == 1) session->self().around_is_faster.store(wanted);
      barrier(group, seq++);
      automatic.begin();
      cached.begin();
      around.begin();
      CHECK_EQ(automatic.around(), wanted);
      CHECK(!cached.around());
      CHECK(around.around());
      barrier(group, seq++);
    }
  });
}

TEST(shared_writes_copy_every_size_and_alignment) {
  std::vector<uint8_t> from(3 * kPiece);
  for (size_t i = 0; i < from.size(); ++i) from[i] = static_cast<uint8_t>(i * 31 + i / 256);
  const auto session = NodeSession::create(0, 1, NodeConfig{4096, 4096});
  for (const Setting setting : {Setting::Auto, Setting::Off, Setting::On}) {
    SharedWrite write(*session, setting);
    for (const size_t bytes : {size_t{0}, size_t{1}, kPiece - 1, kPiece, kPiece + 1, 2 * kPiece + 77}) {
      for (const size_t shift : {0, 1, 64}) {
        std::vector<uint8_t> to(from.size(), 0xEE);
        write.copy(to.data() + shift, from.data() + 3, bytes);
        for (size_t i = 0; i < to.size(); ++i) {
          const bool inside = i >= shift && i < shift + bytes;
          CHECK_EQ(to[i], inside ? from[i - shift + 3] : uint8_t{0xEE});
        }
      }
    }
  }
}

}  // namespace
}  // namespace ours::testing
