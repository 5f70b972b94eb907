#include <mpi.h>
#include <unistd.h>

#include <atomic>
#include <thread>

#include "support/mpi_ranks.h"
#include "support/testing.h"

// What becomes of a process where MPI cannot make a group's communicator. As in mpi_process_test.cpp, each needs
// processes of its own.

namespace {

enum class Trouble { None, CreationFails, CreationHangs, StartHangs };

std::atomic<Trouble> g_trouble{Trouble::None};
std::atomic<bool> g_hanging{false};

void hang() {
  g_hanging = true;
  for (;;) pause();
}

}  // namespace

// In place of MPI's own, as its profiling interface allows.

extern "C" int MPI_Init_thread(int* argc, char*** argv, int required, int* provided) {
  if (g_trouble == Trouble::StartHangs) hang();
  return PMPI_Init_thread(argc, argv, required, provided);
}

extern "C" int MPI_Comm_create_group(MPI_Comm comm, MPI_Group group, int tag, MPI_Comm* created) {
  if (g_trouble == Trouble::CreationFails) {
    MPI_Comm_call_errhandler(comm, MPI_ERR_OTHER);
    return MPI_ERR_OTHER;
  }
  if (g_trouble == Trouble::CreationHangs) hang();
  return PMPI_Comm_create_group(comm, group, tag, created);
}

namespace ours::testing {
namespace {

void creation_fails(const std::string& name) {
  g_trouble = Trouble::CreationFails;
  const auto message = CHECK_THROWS(Error, open_engine(name));
  g_trouble = Trouble::None;
  CHECK_CONTAINS(message, "MPI_Comm_create_group: ");
}

TEST(process_where_a_creation_fails_goes_on) {
  const auto first = open_engine("first");
  creation_fails("fails");
  const auto last = open_engine("last");
  exchange_all(*first, world_rank(), world_size(), 0);
  exchange_all(*last, world_rank(), world_size(), 0);
}

TEST(process_keeps_what_the_program_wants_of_errors) {
  start_mpi(MPI_THREAD_MULTIPLE);
  creation_fails("wants");
  MPI_Errhandler handler = MPI_ERRHANDLER_NULL;
  MPI_Comm_get_errhandler(MPI_COMM_WORLD, &handler);
  CHECK(handler == MPI_ERRORS_ARE_FATAL);
  MPI_Errhandler_free(&handler);
  MPI_Finalize();
}

/// The making of a group that does not come to an end, under way.
class HangingGroup {
 public:
  explicit HangingGroup(Trouble trouble) {
    g_trouble = trouble;
    thread_ = std::thread([this] {
      auto meeting = meeting_of("hangs", world_rank(), world_size());
      meeting.deadline = Deadline::after(std::chrono::milliseconds(1500));
      try {
        ours_open_mpi_engine(meeting);
      } catch (const std::exception& e) {
        error_ = e.what();
      }
    });
    const Deadline deadline = soon();
    while (!g_hanging && !deadline.passed()) std::this_thread::yield();
  }
  ~HangingGroup() {
    if (thread_.joinable()) thread_.join();
  }

  /// Returns when who waits for it has given up, with what that one is told.
  std::string error() {
    thread_.join();
    g_trouble = Trouble::None;
    return error_;
  }

 private:
  std::thread thread_;
  std::string error_;
};

TEST(process_for_a_thread_at_a_time_does_not_wait_for_a_creation_that_hangs) {
  end_together();
  start_mpi(MPI_THREAD_SERIALIZED);
  const int peer = world_rank() ^ 1;
  auto engine = open_engine("good");
  char bytes[2] = {'?', '?'};
  auto kept = engine->receive(peer, 0, &bytes[0], 1);
  auto ended = engine->receive(peer, 1, &bytes[1], 1);
  HangingGroup hanging(Trouble::CreationHangs);
  CHECK(!kept->done());
  ended.reset();
  CHECK_CONTAINS(hanging.error(), "the ranks of hangs did not find each other");
  const auto message = CHECK_THROWS(Error, kept->done());
  CHECK_CONTAINS(message, "MPI did not come back from an earlier call in this process; a message was under way");
  kept.reset();
  engine.reset();
  CHECK_CONTAINS(CHECK_THROWS(Error, open_engine("next")), "MPI did not come back from an earlier call");
}

TEST(process_for_all_threads_goes_on_after_a_creation_that_hangs) {
  end_together();
  const auto engine = open_engine("good");
  HangingGroup hanging(Trouble::CreationHangs);
  exchange_all(*engine, world_rank(), world_size(), 0);
  CHECK_CONTAINS(hanging.error(), "the ranks of hangs did not find each other");
  exchange_all(*engine, world_rank(), world_size(), 100);
  CHECK_CONTAINS(CHECK_THROWS(Error, open_engine("next")), "MPI did not come back from an earlier call");
}

TEST(process_does_not_wait_for_another_thread_that_starts_mpi) {
  HangingGroup hanging(Trouble::StartHangs);
  auto meeting = meeting_of("second", world_rank(), world_size());
  meeting.deadline = Deadline::after(std::chrono::milliseconds(100));
  const auto message = CHECK_THROWS(TimeoutError, ours_open_mpi_engine(meeting));
  CHECK_CONTAINS(message, "another thread of this process is initialising MPI, and was not done within 100 ms");
  CHECK_CONTAINS(hanging.error(), "the ranks of hangs did not find each other");
}

}  // namespace
}  // namespace ours::testing
