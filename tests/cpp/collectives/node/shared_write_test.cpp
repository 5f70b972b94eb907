#include "collectives/node/shared_write.h"

#include <cstdint>
#include <thread>
#include <vector>

#include "support/node_ranks.h"

namespace ours::testing {
namespace {

using std::chrono::microseconds;

constexpr size_t kPiece = WriteTimes::kTimedBytes;

/// One rank on its own, writing a piece every `pause` that costs what `cached` and `around` say. Returns how many of
/// them went around the cache.
struct Writer {
  WriteTimes times;
  Clock::time_point now{};
  microseconds pause{100};

  int write(int pieces, microseconds cached, microseconds around) {
    int went_around = 0;
    for (int i = 0; i < pieces; ++i) {
      now += pause;
      const bool goes_around = times.next(times.around_is_faster(), now);
      times.took(kPiece, goes_around ? around : cached);
      went_around += goes_around ? 1 : 0;
    }
    return went_around;
  }
};

TEST(shared_writes_take_the_faster_way_and_follow_its_changes) {
  for (const auto pause : {microseconds(1), microseconds(100), microseconds(2000), microseconds(10000)}) {
    Writer writer;
    writer.pause = pause;
    const int pieces = pause == microseconds(1) ? 100000 : 4000;
    // Under one cache both cost the same: the cache is used, except for a try now and then.
    const int tries = writer.write(pieces, microseconds(11), microseconds(10));
    CHECK(!writer.times.around_is_faster());
    CHECK(tries >= 40 && tries <= pieces * 3 / 100);
    // The cores move apart, and together again.
    CHECK(writer.write(pieces, microseconds(13), microseconds(10)) >= pieces * 9 / 10);
    CHECK(writer.times.around_is_faster());
    CHECK(writer.write(pieces, microseconds(11), microseconds(10)) <= pieces / 10);
    CHECK(!writer.times.around_is_faster());
  }
}

TEST(shared_writes_are_not_misled_by_interruptions) {
  for (const bool around_is_faster : {false, true}) {
    Writer writer;
    writer.write(200, microseconds(around_is_faster ? 20 : 10), microseconds(10));
    CHECK_EQ(writer.times.around_is_faster(), around_is_faster);
    for (int i = 0; i < 2000; ++i) {
      // Three of four pieces are interrupted.
      const microseconds more(i % 4 != 0 ? 3000 : 0);
      writer.write(1, more + microseconds(around_is_faster ? 20 : 10), more + microseconds(10));
      CHECK_EQ(writer.times.around_is_faster(), around_is_faster);
    }
  }
}

TEST(a_timed_write_goes_as_it_is_set_or_as_it_measures) {
  const auto count_around = [](Setting setting, size_t bytes) {
    WriteTimes times;
    int around = 0;
    for (int i = 0; i < 400; ++i) {
      times.time(setting, times.around_is_faster(), bytes, [&](bool goes_around) {
        const auto cost = microseconds(goes_around || setting != Setting::Auto ? 0 : 200);
        for (const auto end = Clock::now() + cost; Clock::now() < end;) std::this_thread::yield();
        around += goes_around ? 1 : 0;
      });
    }
    return around;
  };
  CHECK_EQ(count_around(Setting::On, kPiece), 400);
  CHECK_EQ(count_around(Setting::On, kPiece - 1), 0);
  CHECK_EQ(count_around(Setting::Off, kPiece), 0);
  CHECK_EQ(count_around(Setting::Auto, kPiece - 1), 0);
  CHECK(count_around(Setting::Auto, kPiece) > 100);
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
