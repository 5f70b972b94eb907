#pragma once

#include <memory>
#include <string>

#include "common/deadline.h"
#include "transport/engine.h"
#include "transport/key_values.h"

namespace ours {

/// How a process was started for MPI: what mpirun, mpiexec or srun has put into its environment.
struct MpiLauncher {
  std::string job;  ///< the same in all processes of a job, and different in other jobs; empty if not launched for MPI
  int rank = -1;    ///< of this process in the job
};

MpiLauncher find_mpi_launcher();

/// The ranks that are to meet through MPI, and the keys through which they exchange what they need for it. The caller
/// may give up before MPI does, so they share the ownership of the keys.
struct MpiMeeting {
  int rank;
  int size;
  std::string group;  ///< the group's name in messages
  std::shared_ptr<KeyValues> keys;
  Deadline deadline;
  MpiLauncher launcher;
};

/// The only function of the library that contains MPI: see make_mpi_engine(). The caller owns the engine.
extern "C" Engine* ours_open_mpi_engine(const MpiMeeting& meeting);
constexpr const char* kOpenMpiEngine = "ours_open_mpi_engine";

}  // namespace ours
