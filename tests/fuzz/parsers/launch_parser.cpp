#include <map>
#include <sstream>

#include "common/launch.h"
#include "fuzz/parser.h"

// The variables that launchers set: lines of NAME=value.

namespace ours::fuzz {
namespace {

std::vector<Seed> seeds() {
  return {
      {"torchrun", "RANK=3\nWORLD_SIZE=8\nLOCAL_RANK=1\nLOCAL_WORLD_SIZE=2\nMASTER_ADDR=10.0.0.1\nMASTER_PORT=29500"},
      {"open_mpi",
       "OMPI_COMM_WORLD_RANK=1\nOMPI_COMM_WORLD_SIZE=2\nOMPI_COMM_WORLD_LOCAL_RANK=1\n"
       "OMPI_COMM_WORLD_LOCAL_SIZE=2\nPMIX_NAMESPACE=prterun-host-17@1"},
      {"hydra", "PMI_RANK=0\nPMI_SIZE=4\nMPI_LOCALRANKID=0\nMPI_LOCALNRANKS=4"},
      {"slurm",
       "SLURM_PROCID=5\nSLURM_STEP_NUM_TASKS=11\nSLURM_LOCALID=1\nSLURM_NODEID=1\n"
       "SLURM_STEP_TASKS_PER_NODE=4(x2),3\nSLURM_STEP_NODELIST=rack[1,4]-node[007-012,3],login1\n"
       "SLURM_JOB_ID=17\nSLURM_STEP_ID=0"},
      {"alone", "WORLD_SIZE=1"}};
}

void parse(const Bytes& input) {
  std::map<std::string, std::string> variables;
  std::istringstream lines(input);
  for (std::string line; std::getline(lines, line);) {
    const size_t equals = line.find('=');
    if (equals != std::string::npos) variables[line.substr(0, equals)] = line.substr(equals + 1);
  }
  const Launch launch = find_launch([&](const char* name) { return variables[name]; });
  require(launch.rank >= 0 && launch.local_rank >= 0, "ranks count from 0");
  require(launch.world_size >= 0 && launch.local_world_size >= 0 && launch.master_port >= 0, "numbers do not wrap");
  require(launch.launcher == "none" || !launch.master_addr.empty(), "rank 0 can be reached");
}

const Registration registration("launch", seeds, parse);

}  // namespace
}  // namespace ours::fuzz
