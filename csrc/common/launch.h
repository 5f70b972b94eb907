#pragma once

#include <functional>
#include <string>

namespace ours {

/// A process's place in its job.
struct Launch {
  std::string launcher = "none";  ///< "torchrun", "Open MPI", "Hydra", "Slurm", or "none" if there was no launcher
  int rank = 0;                   ///< 0 to world_size - 1
  int world_size = 1;             ///< processes of the job
  int local_rank = 0;             ///< 0 to local_world_size - 1
  int local_world_size = 1;       ///< processes of the job on this node
  std::string master_addr = "127.0.0.1";  ///< where rank 0 can be reached
  int master_port = 0;                    ///< where rank 0 listens; 0 if there was no launcher
};

/// Finds the place that torchrun, mpirun, mpiexec or srun gave this process. `lookup` returns a variable of the
/// environment, or an empty text, which counts as not set. Throws InvalidArgument, which names the variable to set, if
/// the variables are incomplete or contradict each other.
Launch find_launch(const std::function<std::string(const char*)>& lookup);

}  // namespace ours
