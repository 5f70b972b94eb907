#include "common/process_watch.h"

#include <sys/wait.h>
#include <unistd.h>

#include <vector>

#include "support/children.h"
#include "support/testing.h"

namespace ours::testing {
namespace {

TEST(process_watch_sees_the_end_of_a_process_that_nobody_reaped) {
  int pipe_ends[2];
  CHECK_EQ(::pipe(pipe_ends), 0);
  const pid_t child = ::fork();
  if (child == 0) {
    // Lives until the parent closes its end of the pipe.
    ::close(pipe_ends[1]);
    char c;
    ::_exit(::read(pipe_ends[0], &c, 1) == 0 ? 0 : 1);
  }
  ::close(pipe_ends[0]);
  const ProcessWatch watch(child);
  const bool ended_early = watch.ended();
  ::close(pipe_ends[1]);
  siginfo_t info;
  ::waitid(P_PID, static_cast<id_t>(child), &info, WEXITED | WNOWAIT);  // it is a zombie now
  const bool ended = watch.ended();
  ::waitpid(child, nullptr, 0);
  CHECK(!ended_early);
  CHECK(ended);
  CHECK(watch.ended());
  CHECK(ProcessWatch(child).ended());
  CHECK(!ProcessWatch().ended());
}

TEST(a_process_that_began_at_another_time_has_taken_the_number_of_one_that_ended) {
  const pid_t parent = ::getppid();
  const uint64_t start = start_of(parent);
  CHECK(start > 0);
  CHECK(start <= start_of(::getpid()));
  CHECK(!ProcessWatch(parent, start).ended());
  CHECK(ProcessWatch(parent, start - 1).ended());
}

TEST(a_process_that_cannot_be_looked_at_for_want_of_a_descriptor_lives) {
  CHECK(in_child([] {
    limit_descriptors(64, 64);
    use_up_descriptors();
    return !ProcessWatch(::getppid()).ended();
  }));
}

TEST(watches_of_one_process_share_a_descriptor) {
  CHECK(in_child([] {
    limit_descriptors(64, 64);
    const std::vector<ProcessWatch> watches = {ProcessWatch(::getppid()), ProcessWatch(::getppid()),
                                               ProcessWatch(::getppid())};
    return !watches[2].ended() && open_null() == 4;  // 3 is the watches'
  }));
}

}  // namespace
}  // namespace ours::testing
