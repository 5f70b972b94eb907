#pragma once

#include <memory>
#include <string>

#include "common/deadline.h"
#include "transport/engine.h"
#include "transport/key_values.h"

namespace ours {

/// How a process was started, as far as MPI is concerned: what mpirun, mpiexec or srun left in its environment.
struct MpiLauncher {
  std::string job;  ///< the same for all processes of one job, another for another job; empty: no such launcher
  int rank = -1;    ///< of this process in the job
};

/// Reads the environment.
MpiLauncher find_mpi_launcher();

/// Who is to meet through MPI, and where they leave word for each other. Who waits may give up before MPI does, so the
/// keys belong to both.
struct MpiMeeting {
  int rank;
  int size;
  std::string group;  ///< for messages
  std::shared_ptr<KeyValues> keys;
  Deadline deadline;
  MpiLauncher launcher;
};

/// The one function that the library with MPI in it has: see make_mpi_engine(). The caller owns the engine.
extern "C" Engine* ours_open_mpi_engine(const MpiMeeting& meeting);
constexpr const char* kOpenMpiEngine = "ours_open_mpi_engine";

}  // namespace ours
