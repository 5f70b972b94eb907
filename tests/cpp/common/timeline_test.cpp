#include "common/timeline.h"

#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <thread>
#include <vector>

#include "common/error.h"
#include "support/children.h"
#include "support/testing.h"

namespace ours::testing {
namespace {

/// A timeline in a file of its own, for the time of a test.
class Recorded {
 public:
  explicit Recorded(int rank = 3, int64_t offset_ns = 0) {
    char path[] = "/tmp/ours-timeline-XXXXXX";
    CHECK(::close(::mkstemp(path)) == 0);
    path_ = path;
    timeline::start(path_, rank, offset_ns);
  }
  ~Recorded() {
    timeline::stop();
    ::unlink(path_.c_str());
  }
  Recorded(const Recorded&) = delete;
  Recorded& operator=(const Recorded&) = delete;

  /// Ends it, and returns the lines that contain `part`.
  std::vector<std::string> lines(const std::string& part) const {
    timeline::stop();
    std::ifstream file(path_);
    std::vector<std::string> found;
    for (std::string line; std::getline(file, line);) {
      if (line.find(part) != std::string::npos) found.push_back(line);
    }
    return found;
  }

 private:
  std::string path_;
};

TEST(nothing_is_recorded_while_the_timeline_is_off) {
  timeline::add("c", "before", {1, 2});
  const Recorded recorded;
  CHECK(timeline::is_on());
  CHECK(recorded.lines("before").empty());
  CHECK(!timeline::is_on());
  timeline::flush();
}

TEST(an_event_has_its_times_by_the_clock_of_rank_0) {
  const Recorded recorded(3, 1'000'000);
  timeline::add("step", "for\"ward\n", {5'001'002, 7'001'007}, R"("iteration":4)", timeline::kModelTrack);
  const std::string expected =
      R"({"ph":"X","name":"for\"ward\u000a","pid":3,"tid":1,"cat":"step","ts":4001.002,"dur":2000.005,)"
      R"("args":{"iteration":4}},)";
  CHECK(recorded.lines("ward") == std::vector<std::string>{expected});
}

TEST(threads_and_their_phases_have_tracks_with_names) {
  const Recorded recorded;
  std::thread([] {
    ::pthread_setname_np(::pthread_self(), "worker");
    const timeline::Phase phase("too long");
    std::this_thread::sleep_for(std::chrono::microseconds(10));
  }).join();
  {
    const timeline::Phase nothing("too short");
  }
  CHECK_EQ(recorded.lines(R"("name":"worker")").size(), 1u);
  CHECK_EQ(recorded.lines("too long").size(), 1u);
}

TEST(events_of_many_threads_are_whole_lines) {
  const Recorded recorded;
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([] {
      for (int i = 0; i < 1000; ++i) timeline::add_overlapping("m", "message", {i, i + 1});
    });
  }
  for (std::thread& thread : threads) thread.join();
  const auto lines = recorded.lines("message");
  CHECK_EQ(lines.size(), 8000u);
  CHECK(std::all_of(lines.begin(), lines.end(), [](const std::string& line) {
    return line.rfind("{\"ph\":\"", 0) == 0 && line.substr(line.size() - 2) == "},";
  }));
}

TEST(a_forked_child_does_not_write_what_its_parent_will) {
  const Recorded recorded;
  timeline::add("c", "once", {1, 2});
  CHECK(in_child([] {
    timeline::add("c", "child", {1, 2});
    timeline::flush();
    return true;
  }));
  CHECK(recorded.lines("child").empty());
}

TEST(a_second_timeline_and_a_missing_file_are_refused) {
  CHECK_CONTAINS(CHECK_THROWS(SystemError, timeline::start("/nowhere/trace.json", 0, 0)), "/nowhere/trace.json");
  const Recorded recorded;
  CHECK_CONTAINS(CHECK_THROWS(InvalidArgument, timeline::start("/tmp", 0, 0)), "recorded already");
}

}  // namespace
}  // namespace ours::testing
