#include <mpi.h>

#include <atomic>

#include "mpi_ranks.h"
#include "testing.h"

// What becomes of a process where MPI cannot make a group's communicator. As in mpi_process_test.cpp, each needs
// processes of its own.

namespace {

enum class Creation { Works, Fails };

std::atomic<Creation> g_creation{Creation::Works};

}  // namespace

/// In place of MPI's own, as its profiling interface allows.
extern "C" int MPI_Comm_create_group(MPI_Comm comm, MPI_Group group, int tag, MPI_Comm* created) {
  if (g_creation == Creation::Fails) {
    MPI_Comm_call_errhandler(comm, MPI_ERR_OTHER);
    return MPI_ERR_OTHER;
  }
  return PMPI_Comm_create_group(comm, group, tag, created);
}

namespace ours {
namespace {

using testing::exchange_all;
using testing::open_engine;
using testing::world_rank;
using testing::world_size;

void creation_fails(const std::string& name) {
  g_creation = Creation::Fails;
  const auto message = CHECK_THROWS(Error, open_engine(name));
  g_creation = Creation::Works;
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
  int provided = 0;
  MPI_Init_thread(nullptr, nullptr, MPI_THREAD_MULTIPLE, &provided);
  creation_fails("wants");
  MPI_Errhandler handler = MPI_ERRHANDLER_NULL;
  MPI_Comm_get_errhandler(MPI_COMM_WORLD, &handler);
  CHECK(handler == MPI_ERRORS_ARE_FATAL);
  MPI_Errhandler_free(&handler);
  MPI_Finalize();
}

}  // namespace
}  // namespace ours
