#include "transport/node/node_session.h"

#include <sys/wait.h>
#include <unistd.h>

#include <set>

#include "common/process_memory.h"
#include "common/process_watch.h"
#include "support/testing.h"

namespace ours::testing {
namespace {

TEST(a_session_opens_by_its_address_and_refuses_a_wrong_nonce) {
  auto leader = NodeSession::create(0, 2, NodeConfig{4096, 4096});
  std::string wrong = leader->address();
  const auto bracket = wrong.find(" [");
  wrong[bracket - 1] = wrong[bracket - 1] == '0' ? '1' : '0';
  CHECK_THROWS(NotSameNode, NodeSession::open(1, 2, wrong));
  CHECK_THROWS(Error, NodeSession::open(1, 3, leader->address()));
  CHECK_THROWS(Error, NodeSession::open(1, 2, "nonsense"));
  auto other = NodeSession::open(1, 2, leader->address());
  CHECK(other->memory()->data() != leader->memory()->data());
  CHECK_THROWS(Error, NodeSession::open(1, 2, leader->address()));  // taken
  other->self().monitor.value.store(77);
  CHECK_EQ(leader->block(1).monitor.value.load(), 77u);
}

TEST(stages_lie_at_different_places_of_their_pages) {
  constexpr size_t kPage = 4096;
  for (const size_t ranks : {2, 7, 64}) {
    const NodeLayout layout{ranks, size_t{512} << 10, kPage};
    std::set<size_t> places;
    for (size_t r = 0; r < ranks; ++r) {
      CHECK_EQ(layout.stage(r, 0) % kCacheLine, size_t{0});
      places.insert(layout.stage(r, 0) % kPage);
      const size_t next = r + 1 < ranks ? layout.stage(r + 1, 0) : layout.channels();
      CHECK(layout.stage(r, 0) + layout.stage_bytes(NodeLayout::kResults) <= next);
    }
    CHECK_EQ(places.size(), ranks);
    CHECK_EQ(layout.channels() % kPage, size_t{0});
  }
}

TEST(attaching_waits_and_names_the_absent) {
  auto leader = NodeSession::create(1, 3, NodeConfig{4096, 4096});
  const std::string message =
      CHECK_THROWS(TimeoutError, leader->wait_attached(Deadline::after(std::chrono::milliseconds(100)), [] {}));
  CHECK_CONTAINS(message, "absent: rank 0, 2");
}

TEST(ranks_that_have_attached_hear_why_another_gives_up) {
  const auto first = NodeSession::create(0, 3, NodeConfig{4096, 4096});
  NodeSession second(1, 3, first->memory());
  const auto give_up = [] { throw PeerError("rank 2 died"); };
  CHECK_THROWS(PeerError, first->wait_attached(Deadline::after(std::chrono::seconds(30)), give_up));
  CHECK_CONTAINS(CHECK_THROWS(PeerError, second.failure().check()), "rank 2 died");
}

TEST(absent_ranks_of_a_node_are_named_by_their_numbers_in_the_group) {
  auto leader = NodeSession::create(1, 3, NodeConfig{4096, 4096});
  leader->widen({2, 4, 7});
  const std::string message =
      CHECK_THROWS(TimeoutError, leader->wait_attached(Deadline::after(std::chrono::milliseconds(10)), [] {}));
  CHECK_CONTAINS(message, "absent: rank 2, 7");
}

TEST(a_rank_that_died_is_named_rather_than_one_that_left) {
  const auto waiting = NodeSession::create(1, 3, NodeConfig{4096, 4096});
  const auto leaving = std::make_shared<NodeSession>(0, 3, waiting->memory());
  const pid_t dying = ::fork();
  if (dying == 0) ::_exit(0);
  siginfo_t ended{};
  CHECK_EQ(::waitid(P_PID, static_cast<id_t>(dying), &ended, WEXITED | WNOWAIT), 0);
  const NodeSession of_dying(2, 3, waiting->memory());
  of_dying.self().pid = dying;
  waiting->wait_attached(Deadline::after(std::chrono::seconds(30)), [] {});
  leaving->leave();
  const std::string message = CHECK_THROWS(PeerError, waiting->lost(0, waiting->absence(0), "a call"));
  CHECK_CONTAINS(message, "rank 2 (");
  CHECK_CONTAINS(message, " died during a call");
  ::waitpid(dying, nullptr, 0);
}

TEST(a_process_that_has_taken_the_number_of_a_dead_rank_is_not_that_rank) {
  const auto waiting = NodeSession::create(0, 2, NodeConfig{4096, 4096});
  CHECK_EQ(waiting->self().start, start_of(::getpid()));
  const NodeSession of_dead(1, 2, waiting->memory());
  of_dead.self().pid = ::getppid();
  of_dead.self().start = start_of(::getppid()) - 1;
  waiting->wait_attached(Deadline::after(std::chrono::seconds(30)), [] {});
  CHECK_CONTAINS(CHECK_THROWS(PeerError, waiting->lost(1, waiting->absence(1), "a call")), " died during a call");
}

/// A rank that is another process, which ends when the pipe is closed.
TEST(a_session_reads_the_memory_of_its_ranks_and_names_one_that_is_gone) {
  std::vector<int> data(1000, 1);  // the other process has a copy at the same address
  const auto leader = NodeSession::create(0, 2, NodeConfig{4096, 4096});
  // It attaches here and is the child's from then on: attaching may start a thread, which ThreadSanitizer does not
  // bear in a child.
  const NodeSession other(1, 2, leader->memory());
  int ends[2];
  CHECK(::pipe(ends) == 0);
  const pid_t pid = ::fork();
  if (pid == 0) {
    ::close(ends[1]);
    char byte = 0;
    const bool closed = ::read(ends[0], &byte, 1) == 0;
    ::_exit(closed ? 0 : 1);
  }
  ::close(ends[0]);
  data.assign(data.size(), 2);
  other.self().pid = pid;
  other.self().start = start_of(pid);
  leader->wait_attached(Deadline::after(std::chrono::seconds(30)), [] {});
  std::vector<int> copy(data.size());
  const auto address = reinterpret_cast<uint64_t>(data.data());
  CHECK_EQ(leader->reads_all(0), read_process_memory(pid, copy.data(), address, 4) == 0);
  if (!leader->reads_all(0)) {  // this system forbids it
    ::close(ends[1]);
    ::waitpid(pid, nullptr, 0);
    return;
  }
  const auto read = [&](uint64_t from) { leader->read(1, copy.data(), from, 4000, [] { return "a call"; }); };
  read(address);
  CHECK(copy == std::vector<int>(1000, 1));
  CHECK_CONTAINS(CHECK_THROWS(SystemError, read(8)), "rank 1");
  ::close(ends[1]);
  CHECK_EQ(::waitpid(pid, nullptr, 0), pid);
  CHECK_CONTAINS(CHECK_THROWS(PeerError, read(address)), "rank 1");
}

TEST(a_session_reads_no_memory_if_its_leader_does_not_want_it) {
  const auto leader = NodeSession::create(0, 1, NodeConfig{4096, 4096, false});
  leader->wait_attached(Deadline::after(std::chrono::seconds(30)), [] {});
  CHECK(!leader->reads_all(0));
}

TEST(a_group_that_takes_more_memory_than_there_is_is_refused_before_any_is_taken) {
  const NodeConfig config{size_t{1} << 40, 4096};
  CHECK_CONTAINS(CHECK_THROWS(Error, NodeSession::create(0, 4, config)), "Set OURS_CHUNK_BYTES to less");
}

}  // namespace
}  // namespace ours::testing
