#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <functional>
#include <vector>

#include "common/descriptors.h"
#include "common/error.h"
#include "common/process_watch.h"
#include "common/shared_memory.h"
#include "support/node_ranks.h"
#include "transport/node/channel.h"
#include "transport/node/core_spread.h"
#include "transport/node/node_barrier.h"
#include "transport/node/node_failure.h"
#include "transport/node/node_wait.h"
#include "transport/node/own_cores.h"

// The parts that the collectives are made of, each on its own.

namespace ours {
namespace {

using testing::run_sessions;

std::byte pattern(size_t i) { return static_cast<std::byte>((i * 2654435761u) >> 13 & 255); }

TEST(shared_memory_is_private_unnamed_and_shared_by_its_path) {
  auto memory = SharedMemory::create(8192);
  struct stat info{};
  CHECK_EQ(::fstat(memory->fd(), &info), 0);
  CHECK_EQ(info.st_mode & 0777u, 0600u);
  CHECK_EQ(info.st_nlink, 0u);
  memory->reserve(0, 8192);
  auto again = SharedMemory::open("/proc/self/fd/" + std::to_string(memory->fd()));
  CHECK_EQ(again->bytes(), 8192u);
  memory->data()[8191] = std::byte{7};
  CHECK(again->data()[8191] == std::byte{7});
  CHECK_CONTAINS(CHECK_THROWS(SystemError, SharedMemory::open("/proc/self/fd/999999")), "No such file");
  CHECK_THROWS(SystemError, SharedMemory::open("/dev/null"));
}

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

int open_null() { return ::open("/dev/null", O_RDONLY | O_CLOEXEC); }

/// Runs `body` in a process of its own, with limits of its own and the descriptors 0 to 2 only: groups of earlier tests
/// that failed may have others. What it returns is whether all was well.
bool in_child(const std::function<bool()>& body) {
  const pid_t child = ::fork();
  if (child == 0) {
    try {
      while (open_null() <= 2) {
      }
      for (int fd = 3; fd < 4096; ++fd) ::close(fd);
      ::_exit(body() ? 0 : 1);
    } catch (const std::exception& e) {
      std::fprintf(stderr, "%s\n", e.what());
      ::_exit(1);
    }
  }
  int status = -1;
  ::waitpid(child, &status, 0);
  return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

void use_up_descriptors() {
  while (open_null() >= 0) {
  }
}

void limit_descriptors(rlim_t soft, rlim_t hard) {
  const rlimit limit{soft, hard};
  ::setrlimit(RLIMIT_NOFILE, &limit);
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
    const std::vector<ProcessWatch> watches = {ProcessWatch(::getppid()), ProcessWatch(::getppid()),
                                               ProcessWatch(::getppid())};
    return !watches[2].ended() && open_null() == 4;  // 3 is the watches'
  }));
}

TEST(the_soft_limit_of_descriptors_is_raised_where_more_are_needed) {
  const auto soft_limit = [] {
    rlimit limit{};
    ::getrlimit(RLIMIT_NOFILE, &limit);
    return limit.rlim_cur;
  };
  CHECK(in_child([&] {
    limit_descriptors(200, 400);
    want_descriptors(10);
    if (soft_limit() != 200) return false;
    want_descriptors(200);
    return soft_limit() == 400;
  }));
  CHECK(in_child([&] {
    limit_descriptors(64, 128);
    use_up_descriptors();
    return with_descriptors(open_null) == 64 && soft_limit() == 128;
  }));
}

TEST(a_lack_of_descriptors_is_told_with_the_limit) {
  CHECK(in_child([] {
    limit_descriptors(64, 64);
    use_up_descriptors();
    const std::string text = CHECK_THROWS(SystemError, SharedMemory::create(4096));
    return text.find("Too many open files") != std::string::npos && text.find("its limit is 64") != std::string::npos &&
           text.find("ulimit -Hn") != std::string::npos;
  }));
}

TEST(memory_is_reserved_in_pieces_however_often_signals_interrupt_it) {
  // As where a timer ticks in the time that the system takes for 1 MiB, and whatever is interrupted is undone.
  size_t end = 4096;
  size_t calls = 0;
  const int error = reserve_in_pieces(4096, 50'000'000, [&](size_t offset, size_t bytes) {
    CHECK_EQ(offset, end);
    CHECK(++calls < 10'000);
    if (bytes > 1'000'000 || calls % 20 == 0) {
      errno = EINTR;
      return -1;
    }
    end += bytes;
    return 0;
  });
  CHECK_EQ(error, 0);
  CHECK_EQ(end, 50'004'096u);
  CHECK_EQ(reserve_in_pieces(0, 8192,
                             [](size_t, size_t) {
                               errno = ENOSPC;
                               return -1;
                             }),
           ENOSPC);
}

TEST(memory_that_cannot_all_be_reserved_is_given_back) {
  // The second piece would make the file larger than files may be.
  CHECK(in_child([] {
    constexpr rlim_t kLimit = rlim_t{20} << 20;
    ::signal(SIGXFSZ, SIG_IGN);
    const Fd file = make_memory_file("ours", 4096);
    const rlimit limit{kLimit, kLimit};
    ::setrlimit(RLIMIT_FSIZE, &limit);
    CHECK_CONTAINS(CHECK_THROWS(SystemError, reserve_memory(file.get(), 0, size_t{40} << 20)), "41943040");
    struct stat info{};
    return ::fstat(file.get(), &info) == 0 && info.st_blocks == 0;
  }));
}

TEST(memory_of_a_rank_alone_has_no_file) {
  const auto memory = SharedMemory::create_alone(8192);
  memory->reserve(0, 8192);
  memory->data()[8191] = std::byte{7};
  CHECK_EQ(memory->fd(), -1);
}

TEST(a_group_that_takes_more_memory_than_there_is_is_refused_before_any_is_taken) {
  const NodeConfig config{size_t{1} << 40, 4096, 4096};
  CHECK_CONTAINS(CHECK_THROWS(Error, NodeSession::create(0, 4, config)), "Set OURS_CHUNK_BYTES to less");
}

/// Ranks that may run on these cores each.
std::vector<CoreShare> shares(const std::vector<std::vector<size_t>>& cores, uint32_t quota = 1000) {
  std::vector<CoreShare> all;
  for (const auto& each : cores) {
    CoreShare share{};
    for (const size_t core : each) share.allowed[core / 64] |= uint64_t{1} << core % 64;
    share.quota = quota;
    all.push_back(share);
  }
  return all;
}

TEST(ranks_have_cores_of_their_own_if_there_is_one_for_each) {
  CHECK(have_own_cores(shares({{0, 1}, {0, 1}})));
  CHECK(!have_own_cores(shares({{0, 1}, {0, 1}, {0, 1}})));
  CHECK(have_own_cores(shares({{5}, {70}, {1023}})));
  CHECK(!have_own_cores(shares({{5}, {70}, {5}})));
  CHECK(have_own_cores(shares({{0, 1, 2}, {0, 1}, {0}})));
  CHECK(!have_own_cores(shares({{}})));
  const std::vector<size_t> many = {0, 1, 2, 3, 4, 5, 6, 7};
  CHECK(have_own_cores(shares({many, many, many, many}, 4)));
  CHECK(!have_own_cores(shares({many, many, many, many}, 3)));
  CHECK_EQ(have_own_cores({own_share()}), own_share().quota >= 1);
}

TEST(channel_carries_a_stream_across_its_end_without_waiting) {
  run_sessions(2, 4096, [](std::shared_ptr<NodeSession> session) {
    if (session->rank() != 0) return;
    Channel out(*session, 0, 1), in(*session, 0, 1);
    const size_t capacity = out.writable();
    CHECK_EQ(capacity, session->layout().ring_bytes);
    CHECK_EQ(in.readable(), 0u);
    size_t written = 0, read = 0;
    // Steps that do not divide the capacity, so that pieces cross the ring's end at many places.
    for (size_t step : {1, 7, 1000, 4095, 4096, 4097, 3, 2500}) {
      std::vector<std::byte> data(step), back(step + 1);
      for (size_t i = 0; i < step; ++i) data[i] = pattern(written + i);
      const size_t taken = out.write(data.data(), step);
      CHECK_EQ(taken, std::min(step, capacity));
      written += taken;
      CHECK_EQ(in.readable(), taken);
      in.peek(back.data(), 1);
      CHECK(back[0] == pattern(read));
      CHECK_EQ(in.read(back.data(), back.size()), taken);
      for (size_t i = 0; i < taken; ++i) CHECK(back[i] == pattern(read + i));
      read += taken;
    }
    CHECK_EQ(out.write("abcdef", 6), 6u);
    CHECK_EQ(in.skip(4), 4u);
    char rest[8] = {};
    CHECK_EQ(in.read(rest, sizeof(rest)), 2u);
    CHECK_EQ(std::string(rest), "ef");
    CHECK_EQ(in.skip(1), 0u);
  });
}

TEST(channel_is_safe_between_one_writer_and_one_reader) {
  constexpr size_t kTotal = 300000;
  run_sessions(2, 4096, [](std::shared_ptr<NodeSession> session) {
    Channel channel(*session, 0, 1);
    std::vector<std::byte> piece(997);
    size_t moved = 0;
    while (moved < kTotal) {
      const size_t most = std::min(piece.size(), kTotal - moved);
      if (session->rank() == 0) {
        for (size_t i = 0; i < most; ++i) piece[i] = pattern(moved + i);
        moved += channel.write(piece.data(), most);
      } else {
        const size_t n = channel.read(piece.data(), most);
        for (size_t i = 0; i < n; ++i) CHECK(piece[i] == pattern(moved + i));
        moved += n;
      }
      std::this_thread::yield();
    }
  });
}

// Plain, unsynchronised memory of two places by turns: ThreadSanitizer proves the barrier's promise, or breaks it.
TEST(barrier_orders_what_is_published_in_two_places_by_turns) {
  constexpr int kRanks = 4, kRounds = 400;
  std::vector<std::array<int, 2>> published(kRanks);
  run_sessions(kRanks, 4096, [&](std::shared_ptr<NodeSession> session) {
    NodeBarrier barrier(*session);
    const auto me = static_cast<size_t>(session->rank());
    for (int round = 0; round < kRounds; ++round) {
      published[me][barrier.next_parity()] = round * 10 + session->rank();
      barrier.sync(Deadline::after(std::chrono::seconds(60)), 1, [] { return std::string("a test"); });
      for (int r = 0; r < kRanks; ++r) {
        CHECK_EQ(published[static_cast<size_t>(r)][barrier.parity()], round * 10 + r);
      }
    }
  });
}

TEST(a_sleeper_is_woken_by_every_signal) {
  SleepWord ping{}, pong{};
  // No time awake at all: every wait goes to sleep, where a lost wake-up would cost kLookAround and be counted.
  WaitPolicy policy;
  policy.awake = std::chrono::microseconds(0);
  const Deadline deadline = Deadline::after(std::chrono::seconds(60));
  std::atomic<int> overslept{0};
  constexpr uint32_t kRounds = 500;
  testing::run_ranks(2, [&](int rank) {
    for (uint32_t i = 1; i <= kRounds; ++i) {
      SleepWord& mine = rank == 0 ? ping : pong;
      SleepWord& other = rank == 0 ? pong : ping;
      if (rank == 0) signal(mine);
      const auto start = Clock::now();
      wait_on(other, policy, deadline, [&] { return other.value.load() >= i; }, [] {});
      if (Clock::now() - start >= kLookAround) ++overslept;
      if (rank == 1) signal(mine);
    }
  });
  // A busy machine may delay a few; lost wake-ups would delay a good part of them.
  CHECK(overslept.load() < static_cast<int>(kRounds) / 5);
}

TEST(the_first_failure_is_everyones_failure) {
  std::vector<std::string> messages(4);
  run_sessions(4, 4096, [&](std::shared_ptr<NodeSession> session) {
    const int rank = session->rank();
    if (rank >= 2) session->failure().fail(FailureKind::Peer, "rank " + std::to_string(rank) + " was first");
    const Deadline deadline = Deadline::after(std::chrono::seconds(60));
    wait_on(
        session->self().doorbell, session->wait_policy(), deadline, [&] { return session->failure().failed(); }, [] {});
    messages[static_cast<size_t>(rank)] = CHECK_THROWS(PeerError, session->failure().check());
    // Later failures do not replace it, not even here.
    session->failure().fail(FailureKind::Timeout, "too late");
    CHECK_EQ(session->failure().message(), messages[static_cast<size_t>(rank)]);
  });
  CHECK_EQ(messages[0], messages[1]);
  CHECK(messages[0] == "rank 2 was first" || messages[0] == "rank 3 was first");
}

TEST(a_failure_longer_than_the_segment_holds_is_cut_for_peers) {
  run_sessions(2, 4096, [](std::shared_ptr<NodeSession> session) {
    if (session->rank() == 0) session->failure().fail(FailureKind::Timeout, std::string(100000, 'x'));
    const Deadline deadline = Deadline::after(std::chrono::seconds(60));
    wait_on(
        session->self().doorbell, session->wait_policy(), deadline, [&] { return session->failure().failed(); }, [] {});
    const auto message = CHECK_THROWS(TimeoutError, session->failure().check());
    CHECK_EQ(message.size(), session->rank() == 0 ? 100000u : sizeof(SegmentHeader::failure_message) - 1);
  });
}

TEST(the_last_rank_of_a_crowded_core_moves_to_the_emptiest) {
  const std::vector<int> two{0, 1};
  CHECK_EQ(better_core({0, 0, 0, 1}, 2, two), 1);
  CHECK_EQ(better_core({0, 0, 0, 1}, 1, two), -1);  // not the last one on its core
  CHECK_EQ(better_core({0, 0, 0, 1}, 3, two), -1);
  CHECK_EQ(better_core({0, 0, 1}, 1, two), -1);  // it would only change places
  CHECK_EQ(better_core({3, 3}, 1, {3, 5}), 5);
  CHECK_EQ(better_core({3, 3}, 1, {3}), -1);
  CHECK_EQ(better_core({3, 3}, 1, {}), -1);
  CHECK_EQ(better_core({0, 0, 0, 0, 1, 1, 2}, 3, {0, 1, 2}), 2);
}

TEST(a_moved_thread_may_be_moved_on_as_before) {
  const std::vector<int> before = allowed_cores();
  CHECK(!before.empty());
  for (const int core : before) {
    CHECK(move_to_core(core));
    CHECK(allowed_cores() == before);
  }
  CHECK(!move_to_core(CPU_SETSIZE - 1) || before.back() == CPU_SETSIZE - 1);
  CHECK(allowed_cores() == before);
}

TEST(of_ranks_on_one_core_the_last_moves) {
  const std::vector<int> cores = allowed_cores();
  if (cores.size() < 2) return;  // nowhere to move to
  run_sessions(2, 4096, [&](std::shared_ptr<NodeSession> session) {
    NodeBarrier barrier(*session);
    const auto sync = [&] { barrier.sync(Deadline::after(std::chrono::seconds(30)), 1, [] { return "a test"; }); };
    CoreSpread spread(*session);
    const size_t parity = barrier.next_parity();
    std::atomic<int32_t>& core = session->self().arrival[parity].core;
    spread.publish(parity);
    CHECK(std::find(cores.begin(), cores.end(), core.load()) != cores.end());
    core.store(cores[0]);
    sync();
    const auto begin = Clock::now();
    CHECK_EQ(spread.settle(parity), session->rank() == 1);
    const bool again = spread.settle(parity);
    // So soon it is not tried again, unless it was not soon.
    CHECK(!again || Clock::now() - begin >= std::chrono::milliseconds(4));
    sync();
    core.store(cores[static_cast<size_t>(session->rank())]);
    sync();
    CHECK_EQ(CoreSpread(*session).settle(parity), false);
  });
}

}  // namespace
}  // namespace ours
