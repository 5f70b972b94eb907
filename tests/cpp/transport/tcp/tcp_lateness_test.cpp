#include "transport/tcp/tcp_lateness.h"

#include <cstdlib>
#include <thread>

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

/// Tells whether a time is right, give or take what has passed since the test began, as it may lose its core.
struct About {
  bool operator()(int64_t us, milliseconds expected) const {
    const auto off = std::chrono::microseconds(std::abs(us - std::chrono::microseconds(expected).count()));
    return off <= Clock::now() - began + milliseconds(1);
  }
  Clock::time_point began = Clock::now();
};

TEST(a_header_names_the_last_two_ranks_that_its_sender_knows) {
  const About is_about;
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
  const About is_about;
  const FrameHeader header = Listener(1, milliseconds(50)).header();
  CHECK_EQ(header.last[0].rank, 1u);
  CHECK(is_about(header.last[0].us_ago, milliseconds(50)));
  CHECK_EQ(header.last[1].rank, UINT32_MAX);
}

// Rank 2 was late. Rank 1 has heard of it from rank 2, and rank 0 from rank 1 alone.
TEST(news_of_a_late_rank_are_passed_on) {
  const About is_about;
  const Listener late(2);
  Listener between(1, milliseconds(300));
  between.lateness.hear(late.header());
  Listener far(0, milliseconds(400));
  far.lateness.hear(between.header());
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
  rank.lateness.hear(late.header());
  CHECK_EQ(rank.arrivals.last(0), -1);
  rank.lateness.set_idle(true);
  rank.lateness.hear(late.header());
  CHECK_EQ(rank.arrivals.last(), 2);
}

/// Two ranks whose last call ended at the same time. Then rank 2 came to the next one, and rank 0 much later.
struct Late {
  Late() {
    for (Listener* rank : {&early, &late}) {
      rank->lateness.end();
      rank->arrivals.begin(rank == &late ? 0 : 2);
    }
    const auto called = Clock::now();
    early.lateness.begin(&early.arrivals, called);
    frame = early.header();
    // Rank 1 came 20 ms before rank 2.
    frame.last[1] = {1, 20'000};
    std::this_thread::sleep_for(milliseconds(30));
    late.lateness.begin(&late.arrivals, Clock::now());
    const auto slept = Clock::now() - called;
    distance = std::chrono::duration_cast<milliseconds>(slept);
    is_about.began += slept;
  }

  About is_about;
  Listener early{2}, late{0};
  FrameHeader frame;
  milliseconds distance;
};

// The frame was there when rank 0 made the call.
TEST(a_late_rank_finds_out_how_much_sooner_the_others_came) {
  Late ranks;
  ranks.late.lateness.hear(ranks.frame);
  CHECK_EQ(ranks.late.arrivals.last(), 0);
  CHECK(ranks.is_about(-ranks.late.arrivals.at(2), ranks.distance));
  const int64_t sent = ranks.late.arrivals.at(2) + int64_t{ranks.frame.last[0].us_ago};
  CHECK_EQ(ranks.late.arrivals.at(1), sent - 20'000);
  // Another frame that rank 2 sent then has been on its way until now.
  ranks.late.lateness.set_idle(true);
  ranks.late.lateness.hear(ranks.frame);
  CHECK_EQ(ranks.late.arrivals.last(), 0);
}

TEST(no_frame_was_sent_after_it_was_found) {
  Late ranks;
  ranks.frame.us_since_last_call += 60'000'000;
  ranks.late.lateness.hear(ranks.frame);
  CHECK(ranks.late.arrivals.at(2) < 30'000'000);
}

// This rank has sent its data, and the answer comes before it has looked in vain. It names a rank that came last.
TEST(an_answer_may_come_before_a_rank_has_to_wait_for_it) {
  Late ranks;
  FrameHeader answer = ranks.frame;
  answer.us_since_last_call += 50'000;
  answer.last = {Arrived{1, 2'000}, Arrived{2, 50'000}};
  std::this_thread::sleep_for(std::chrono::milliseconds(25));
  ranks.late.lateness.hear(answer);
  CHECK_EQ(ranks.late.arrivals.last(), 1);
  CHECK(ranks.is_about(ranks.late.arrivals.at(1), milliseconds(50 - 2) - ranks.distance));
}

TEST(a_frame_from_before_the_call_says_nothing_without_an_earlier_call) {
  Late ranks;
  ranks.frame.us_since_last_call = Listener(2).header().us_since_last_call;
  ranks.late.lateness.hear(ranks.frame);
  CHECK_EQ(ranks.late.arrivals.last(0), -1);
}

TEST(what_a_header_says_of_its_reader_or_of_no_rank_is_ignored) {
  Listener rank(0, milliseconds(300));
  FrameHeader header;
  header.last = {Arrived{0, 0}, Arrived{kSize, 0}};
  rank.lateness.hear(header);
  header.last = {Arrived{}, Arrived{UINT32_MAX - 1, UINT32_MAX}};
  rank.lateness.hear(header);
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
  lateness.hear(Listener(1).header());
}

}  // namespace
}  // namespace ours::testing
