#include "transport/tcp/tcp_lateness.h"

#include "support/testing.h"

// What ranks tell each other of the last arrivals at a call, in the headers of what they send anyway.

namespace ours::testing {
namespace {

using std::chrono::milliseconds;

constexpr int kSize = 4;

/// Rank `own` in a call that it made some time ago.
struct Listener {
  explicit Listener(int own, milliseconds ago = milliseconds(0)) : lateness(own, kSize) {
    arrivals.begin(own);
    lateness.begin(&arrivals, Clock::now() - ago);
    lateness.set_idle(true);
  }
  /// What the rank would send now.
  FrameHeader header() const {
    FrameHeader header;
    lateness.stamp(header);
    return header;
  }

  Arrivals arrivals{kSize};
  TcpLateness lateness;
};

/// Whether it was that many milliseconds, or a little longer, since the test may lose its core.
bool is_about(int64_t us, milliseconds expected) { return us >= expected.count() * 1000 && us < 60'000'000; }

TEST(a_header_names_the_last_two_ranks_that_its_sender_knows) {
  Listener rank(0, milliseconds(500));
  rank.arrivals.note(2, 100'000);
  rank.arrivals.note(3, 300'000);
  const FrameHeader header = rank.header();
  CHECK_EQ(header.last[0].rank, 3u);
  CHECK(is_about(header.last[0].us_ago, milliseconds(200)));
  CHECK_EQ(header.last[1].rank, 2u);
  CHECK(is_about(header.last[1].us_ago, milliseconds(400)));
}

TEST(a_sender_that_knows_only_itself_names_no_second_rank) {
  const FrameHeader header = Listener(1, milliseconds(50)).header();
  CHECK_EQ(header.last[0].rank, 1u);
  CHECK(is_about(header.last[0].us_ago, milliseconds(50)));
  CHECK_EQ(header.last[1].rank, UINT32_MAX);
}

// Rank 2 was late. Rank 1 has heard of it from rank 2, and rank 0 from rank 1 alone.
TEST(news_of_a_late_rank_are_passed_on) {
  const Listener late(2);
  Listener between(1, milliseconds(300));
  between.lateness.hear(2, late.header());
  Listener far(0, milliseconds(400));
  far.lateness.hear(1, between.header());
  CHECK_EQ(far.arrivals.last(), 2);
  CHECK(is_about(far.arrivals.at(2), milliseconds(400)));
  CHECK_EQ(far.arrivals.last(2), 1);
  CHECK(is_about(far.arrivals.at(1), milliseconds(100)));
}

// A frame that lay in the socket while the rank did other things says nothing about the time when it came.
TEST(frames_count_that_a_rank_was_waiting_for) {
  const Listener late(2);
  Listener rank(0, milliseconds(300));
  rank.lateness.set_idle(false);
  rank.lateness.hear(2, late.header());
  CHECK_EQ(rank.arrivals.last(0), -1);
  rank.lateness.set_idle(true);
  rank.lateness.hear(2, late.header());
  CHECK_EQ(rank.arrivals.last(), 2);
}

// Rank 0 is late. Of what rank 2 sent to it long before, with rank 1's news, some is there and some comes later; all of
// it says that the two had just arrived.
TEST(who_sent_before_a_rank_made_its_call_was_there_before) {
  Listener early(2);
  early.arrivals.note(1, 0);
  Listener rank(0);
  rank.lateness.begin(&rank.arrivals, Clock::now() - milliseconds(10));
  rank.lateness.set_idle(false);
  rank.lateness.hear(2, early.header());
  CHECK_EQ(rank.arrivals.last(), 0);
  CHECK(rank.arrivals.at(1) < 0 && rank.arrivals.at(2) < 0);
  rank.lateness.set_idle(true);
  rank.lateness.hear(2, early.header());
  CHECK_EQ(rank.arrivals.last(), 0);
}

TEST(what_a_header_says_of_its_reader_or_of_no_rank_is_ignored) {
  Listener rank(0, milliseconds(300));
  FrameHeader header;
  header.last = {Arrived{0, 0}, Arrived{kSize, 0}};
  rank.lateness.hear(3, header);
  header.last = {Arrived{}, Arrived{UINT32_MAX - 1, UINT32_MAX}};
  rank.lateness.hear(3, header);
  CHECK_EQ(rank.arrivals.last(), 0);
  CHECK_EQ(rank.arrivals.at(0), 0);
  CHECK_EQ(rank.arrivals.last(0), -1);
}

TEST(a_call_that_nobody_asks_about_is_neither_told_nor_heard_of) {
  TcpLateness lateness(0, kSize);
  lateness.begin(nullptr, Clock::now());
  lateness.set_idle(true);
  FrameHeader header;
  lateness.stamp(header);
  CHECK_EQ(header.last[0].rank, UINT32_MAX);
  lateness.hear(1, Listener(1).header());
}

}  // namespace
}  // namespace ours::testing
