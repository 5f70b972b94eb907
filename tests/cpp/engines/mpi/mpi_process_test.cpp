#include <mpi.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>

#include "engines/mpi/process.h"
#include "engines/mpi_plan.h"
#include "support/children.h"
#include "support/mpi_ranks.h"
#include "support/ranks.h"

// Each of these needs processes of its own, since MPI starts once in a process: one name is given to each run.

namespace ours::testing {
namespace {

TEST(process_with_mpi_for_one_thread_is_refused) {
  start_mpi(MPI_THREAD_SINGLE);
  const auto message = CHECK_THROWS(Error, open_engine("single"));
  CHECK_CONTAINS(message, "MPI was initialised with the thread level MPI_THREAD_SINGLE, but");
  CHECK_CONTAINS(message, "initialise it with MPI_THREAD_MULTIPLE");
  MPI_Finalize();
}

TEST(process_with_mpi_for_a_thread_at_a_time) {
  start_mpi(MPI_THREAD_SERIALIZED);
  std::unique_ptr<Engine> engines[2];
  for (int which = 0; which < 2; ++which) engines[which] = open_engine("serialized" + std::to_string(which));
  run_ranks(2, [&](int thread) {
    for (uint32_t round = 0; round < 10; ++round) {
      exchange_all(*engines[thread], world_rank(), world_size(), round * 100);
    }
  });
  for (auto& engine : engines) engine.reset();
  MPI_Finalize();
}

TEST(process_with_mpi_for_all_threads_ends_it_itself) {
  start_mpi(MPI_THREAD_MULTIPLE);
  {
    const auto engine = open_engine("multiple");
    exchange_all(*engine, world_rank(), world_size(), 0);
  }
  int finalized = 0;
  MPI_Finalized(&finalized);
  CHECK_EQ(finalized, 0);
  MPI_Finalize();
}

TEST(process_after_mpi_is_refused) {
  start_mpi(MPI_THREAD_MULTIPLE);
  auto engine = open_engine("before");
  MPI_Finalize();
  char byte = 0;
  auto message = CHECK_THROWS(Error, engine->send(0, 0, &byte, 1));
  CHECK_CONTAINS(message, "MPI has ended in this process");
  engine.reset();
  message = CHECK_THROWS(Error, open_engine("after"));
  CHECK_CONTAINS(message, "MPI_Finalize has been called in this process");
}

TEST(process_forks_with_a_group) {
  auto engine = open_engine("fork");
  char byte = 0;
  auto transfer = engine->receive((world_rank() + 1) % world_size(), 0, &byte, 1);
  const pid_t child = fork();
  if (child == 0) {
    // Everything the parent has is left alone, and the exit handlers run.
    const bool refused = [&] {
      try {
        transfer->done();
      } catch (const Error&) {
        return true;
      }
      return false;
    }();
    transfer.reset();
    engine.reset();
    std::exit(refused ? 0 : 1);  // NOLINT(concurrency-mt-unsafe)
  }
  int status = -1;
  CHECK_EQ(waitpid(child, &status, 0), child);
  CHECK_EQ(status, 0);
  const char mine = 'a';
  const auto sent = engine->send((world_rank() + world_size() - 1) % world_size(), 0, &mine, 1);
  finish(*transfer);
  finish(*sent);
  CHECK_EQ(byte, 'a');
}

TEST(process_forks_before_it_has_a_group) {
  start_mpi(MPI_THREAD_MULTIPLE);
  CHECK(in_child([] {
    const auto meeting = meeting_of("child", world_rank(), world_size());
    return CHECK_THROWS(Error, mpi::Process::get().introduce(meeting)) ==
           "MPI cannot be used in a child that was forked after MPI was started";
  }));
  exchange_all(*open_engine("parent"), world_rank(), world_size(), 0);
  MPI_Finalize();
}

TEST(process_leaves_a_message_behind) {
  const auto engine = open_engine("behind");
  const std::vector<char> data(256 << 10);
  if (world_rank() == 1) engine->send(0, 0, data.data(), data.size()).reset();
  meet("behind met");
}

TEST(process_ends_with_a_message_under_way) {
  end_together();
  static char byte;
  // As in a thread that goes on while the process ends.
  static auto* under_way = open_engine("under way")->receive((world_rank() + 1) % world_size(), 0, &byte, 1).release();
  CHECK(!under_way->done());
}

TEST(process_waits_for_nobody_who_does_not_come) {
  auto meeting = meeting_of("never", world_rank(), world_size());
  meeting.deadline = Deadline::after(std::chrono::milliseconds(300));
  // Rank 1 says that it takes part, and then does not: MPI_Init waits for it in vain.
  if (world_rank() == 1) {
    mpi::RankInfo info;
    info.state = mpi::RankInfo::State::Launched;
    info.rank = 1;
    info.job = meeting.launcher.job;
    info.library = mpi::library_name();
    mpi::agree(meeting, info);
    meet("never met");
    return;
  }
  const auto message = CHECK_THROWS(TimeoutError, ours_open_mpi_engine(meeting));
  CHECK_CONTAINS(message, "the ranks of never did not find each other through");
  const auto again = CHECK_THROWS(Error, ours_open_mpi_engine(meeting));
  CHECK_CONTAINS(again, "MPI did not come back from an earlier call in this process");
  meet("never met");
}

TEST(process_that_mpirun_did_not_start) {
  const auto message = CHECK_THROWS(Error, open_engine("alone"));
  CHECK_CONTAINS(message, "the ranks were not started by a launcher of ");
  CHECK_CONTAINS(message, "(ourddp.init() finds rank and size there)");
  CHECK_CONTAINS(message, "OURS_INTERNODE=tcp");
}

}  // namespace
}  // namespace ours::testing
