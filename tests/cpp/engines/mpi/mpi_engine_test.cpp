#include <algorithm>
#include <vector>

#include "engines/mpi_plan.h"
#include "support/mpi_ranks.h"
#include "support/ranks.h"

namespace ours::testing {
namespace {

TEST(engine_name_says_which_mpi_it_is) {
  const auto engine = open_engine("name");
  CHECK_CONTAINS(engine->name(), "mpi (");
  CHECK(engine->name().find('\n') == std::string::npos);
  CHECK(engine->polls());
}

TEST(engine_messages_of_all_sizes_go_both_ways_at_once) {
  const auto engine = open_engine("sizes");
  for (uint32_t round = 0; round < 20; ++round) exchange_all(*engine, world_rank(), world_size(), round * 100);
}

TEST(engine_numbers_may_be_beyond_the_tags_of_mpi) {
  const auto engine = open_engine("numbers");
  exchange_all(*engine, world_rank(), world_size(), ~uint32_t{0} - 2);
}

TEST(engine_a_slow_peer_does_not_hold_up_another) {
  if (world_size() < 3) return;
  const auto engine = open_engine("order");
  std::vector<char> first(256 << 10), second(256 << 10);
  if (world_rank() == 0) {
    const auto late = engine->receive(1, 0, first.data(), first.size());
    const auto early = engine->receive(2, 0, second.data(), second.size());
    finish(*early);
    CHECK(!late->done());
    keys_of("order")->set("go", "");
    finish(*late);
    CHECK(first == contents(1, 0, 0, first.size()));
    CHECK(second == contents(2, 0, 0, second.size()));
  } else if (world_rank() < 3) {
    if (world_rank() == 1) keys_of("order")->get("go", soon());
    const auto data = contents(world_rank(), 0, 0, first.size());
    finish(*engine->send(0, 0, data.data(), data.size()));
  }
  meet("order met");
}

TEST(engine_a_receive_that_ends_leaves_its_memory_alone) {
  const auto engine = open_engine("cancel");
  if (world_rank() == 0) {
    std::vector<char> memory(4096, 'm');
    engine->receive(1, 0, memory.data(), memory.size()).reset();
    meet("cancelled");
    const auto next = contents(1, 0, 0, 4096);
    std::vector<char> other(4096);
    // The receive is gone as if it had never been: the message goes to the next one.
    finish(*engine->receive(1, 0, other.data(), other.size()));
    CHECK(other == next);
    CHECK(memory == std::vector<char>(4096, 'm'));
  } else {
    meet("cancelled");
    const auto data = contents(1, 0, 0, 4096);
    if (world_rank() == 1) finish(*engine->send(0, 0, data.data(), data.size()));
  }
}

TEST(engine_a_send_that_ends_does_not_read_its_memory_any_more) {
  const auto engine = open_engine("abandoned");
  std::vector<char> memory = contents(1, 0, 0, 256 << 10);
  const auto expected = memory;
  if (world_rank() == 1) {
    engine->send(0, 0, memory.data(), memory.size()).reset();
    std::fill(memory.begin(), memory.end(), 'x');
  }
  meet("abandoned met");
  if (world_rank() == 0) {
    std::vector<char> received(expected.size());
    const auto transfer = engine->receive(1, 0, received.data(), received.size());
    keys_of("abandoned")->set("posted", "");
    finish(*transfer);
    CHECK(received == expected);
    keys_of("abandoned")->set("received", "");
  } else if (world_rank() == 1) {
    // Other groups' messages move this one along as well.
    keys_of("abandoned")->get("posted", soon());
    std::vector<char> never(1);
    const auto other = engine->receive(0, 99, never.data(), 1);
    for (bool received = false; !received;) {
      CHECK(!other->done());
      try {
        keys_of("abandoned")->get("received", Deadline::after(std::chrono::milliseconds(0)));
        received = true;
      } catch (const TimeoutError&) {
      }
    }
  }
  meet("abandoned end");
}

TEST(engine_groups_are_made_and_used_by_two_threads_at_once) {
  run_ranks(2, [](int thread) {
    for (int round = 0; round < 5; ++round) {
      const auto engine = open_engine("thread" + std::to_string(thread) + "round" + std::to_string(round));
      exchange_all(*engine, world_rank(), world_size(), 0);
    }
  });
}

TEST(engine_groups_of_some_ranks_in_another_order) {
  if (world_size() < 3 || world_rank() == 0) return;
  const int size = world_size() - 1;
  const int rank = size - world_rank();  // the last is rank 0
  const std::unique_ptr<Engine> engine(ours_open_mpi_engine(meeting_of("some", rank, size)));
  exchange_all(*engine, rank, size, 0);
}

TEST(engine_nothing_is_sent_after_the_end) {
  const auto engine = open_engine("closed");
  engine->close();
  engine->close();
  char byte = 0;
  const auto message = CHECK_THROWS(Error, engine->send(0, 0, &byte, 1));
  CHECK_CONTAINS(message, "the group has ended");
}

TEST(engine_a_rank_without_mpi_fails_all) {
  const auto meeting = meeting_of("without", world_rank(), world_size());
  const auto message = CHECK_THROWS(
      Error, if (world_rank() == 1) { mpi::agree(meeting, mpi::RankInfo::failure("there is none")); } else {
        ours_open_mpi_engine(meeting);
      });
  CHECK_EQ(message, "rank 1 cannot send by MPI: there is none");
}

TEST(engine_who_does_not_come_is_named) {
  auto meeting = meeting_of("late", world_rank(), world_size());
  meeting.deadline = Deadline::after(std::chrono::milliseconds(50));
  if (world_rank() == 0) {
    const auto message = CHECK_THROWS(TimeoutError, ours_open_mpi_engine(meeting));
    CHECK_CONTAINS(message, "rank 1 did not say that it can send by MPI within 50 ms");
  }
  meet("late end");
}

TEST(engine_many_groups_come_and_go) {
  for (int round = 0; round < 20; ++round) {
    const auto engine = open_engine("many" + std::to_string(round));
    exchange_all(*engine, world_rank(), world_size(), 0);
  }
}

}  // namespace
}  // namespace ours::testing
