#include "common/launch.h"

#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <optional>

#include "common/error.h"
#include "common/siphash.h"

namespace ours {

namespace {

constexpr int kFirstPort = 20000;  // below Linux's ephemeral ports, which any program may be using
constexpr int kPorts = 12768;
/// The first step number of batch scripts and logins, which srun does not start as tasks.
constexpr int64_t kSpecialSteps = (int64_t{1} << 32) - 16;

bool is_number(const std::string& text) {
  return !text.empty() && text.size() <= 18 && text.find_first_not_of("0123456789") == std::string::npos;
}

/// The launcher's process on this node, which is the parent of all ranks there.
std::string parent() { return std::to_string(::getppid()); }

/// The first host of a list as Slurm writes it: "rack[1,4]-node[007-012,3],login1" has rack1-node007.
std::string first_host(const std::string& nodes) {
  std::string host;
  int depth = 0;
  bool skip = false;  // the rest of a bracket after its first number
  for (const char letter : nodes) {
    if (letter == ',' && depth == 0) break;
    if (letter == '[' || letter == ']') {
      depth += letter == '[' ? 1 : -1;
      skip = false;
      if (depth < 0 || depth > 1) break;
      continue;
    }
    if (depth == 1 && (letter == ',' || letter == '-')) skip = true;
    if (!skip) host += letter;
  }
  if (host.empty() || depth != 0) {
    throw InvalidArgument("'" + nodes + "' is not a Slurm host list: set MASTER_ADDR to the host of rank 0");
  }
  return host;
}

/// The number of tasks of node number `node` in Slurm's "4(x2),3": 4, 4 and 3.
int tasks_of_node(const std::string& tasks, int64_t node) {
  int64_t first = 0;
  for (size_t begin = 0; begin < tasks.size();) {
    const size_t end = std::min(tasks.find(',', begin), tasks.size());
    const std::string item = tasks.substr(begin, end - begin);
    begin = end + 1;
    const size_t times = item.find("(x");
    const std::string count = item.substr(0, times);
    const std::string repeats = times == std::string::npos ? "1" : item.substr(times + 2, item.size() - times - 3);
    if (!is_number(count) || !is_number(repeats) || std::stoll(count) > std::numeric_limits<int>::max()) break;
    first += std::stoll(repeats);
    if (node < first) return std::stoi(count);
  }
  throw InvalidArgument("node " + std::to_string(node) + " is not in SLURM_STEP_TASKS_PER_NODE='" + tasks + "'");
}

/// The variables of a process, and what several launchers' have in common.
class Environment {
 public:
  explicit Environment(const std::function<std::string(const char*)>& lookup) : lookup_(lookup) {}

  std::string text(const char* name) const { return lookup_(name); }
  bool has(const char* name) const { return !text(name).empty(); }
  std::string first_of(const char* one, const char* other) const { return has(one) ? text(one) : text(other); }

  int64_t number(const char* name, std::optional<int64_t> otherwise = {}) const {
    const std::string value = text(name);
    if (is_number(value)) return std::stoll(value);
    if (value.empty() && otherwise) return *otherwise;
    const std::string state = value.empty() ? "not set" : "'" + value + "', which is not a non-negative integer";
    throw InvalidArgument(std::string(name) + " is " + state +
                          ": start the ranks with torchrun, mpirun, mpiexec or srun");
  }
  int count(const char* name, std::optional<int64_t> otherwise = {}) const {
    const int64_t value = number(name, otherwise);
    if (value <= std::numeric_limits<int>::max()) return static_cast<int>(value);
    throw InvalidArgument(std::string(name) + " is " + std::to_string(value) + ", which is too large");
  }

  std::string master_addr(bool one_node, const char* how) const {
    if (has("MASTER_ADDR")) return text("MASTER_ADDR");
    if (one_node) return Launch().master_addr;
    throw InvalidArgument("the job has several nodes, and MPI does not tell where rank 0 is: start it with " +
                          std::string(how));
  }
  /// MASTER_PORT, or a port that all ranks of the job compute alike and other jobs hardly ever do.
  int master_port(const std::string& job) const {
    if (has("MASTER_PORT")) return count("MASTER_PORT");
    return kFirstPort + static_cast<int>(siphash({}, job.data(), job.size()) % kPorts);
  }

 private:
  const std::function<std::string(const char*)>& lookup_;
};

void check_order(const Environment& environment, const char* rank, const char* size) {
  if (!environment.has(rank) || !environment.has(size)) return;
  const int number = environment.count(rank);
  const int count = environment.count(size);
  if (number < count) return;
  throw InvalidArgument(std::string(rank) + " is " + std::to_string(number) + " and " + size + " is " +
                        std::to_string(count) + ": ranks are numbered from 0 to " + std::to_string(count - 1));
}

Launch of_torchrun(const Environment& environment) {
  check_order(environment, "RANK", "WORLD_SIZE");
  check_order(environment, "LOCAL_RANK", "LOCAL_WORLD_SIZE");
  for (const char* name : {"MASTER_ADDR", "MASTER_PORT"}) {
    if (environment.has(name)) continue;
    throw InvalidArgument(std::string("RANK is set, but not ") + name +
                          ": set it alike in all ranks, or start them with torchrun");
  }
  return {"torchrun",
          environment.count("RANK"),
          environment.count("WORLD_SIZE"),
          environment.count("LOCAL_RANK", 0),
          environment.count("LOCAL_WORLD_SIZE", 1),
          environment.text("MASTER_ADDR"),
          environment.count("MASTER_PORT")};
}

Launch of_open_mpi(const Environment& environment) {
  const int size = environment.count("OMPI_COMM_WORLD_SIZE");
  const int local_size = environment.count("OMPI_COMM_WORLD_LOCAL_SIZE");
  // PMIx's name of the job has mpirun's host and process; Open MPI 4 has a number.
  const std::string job = environment.first_of("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid");
  return {"Open MPI",
          environment.count("OMPI_COMM_WORLD_RANK"),
          size,
          environment.count("OMPI_COMM_WORLD_LOCAL_RANK"),
          local_size,
          environment.master_addr(size == local_size, "mpirun -x MASTER_ADDR=<host of rank 0>"),
          environment.master_port(job.empty() ? parent() : job)};
}

/// The mpiexec of MPICH and that of Intel MPI both tell a process its number on the node.
Launch of_hydra(const Environment& environment) {
  const int size = environment.count("PMI_SIZE");
  const int local_size = environment.count("MPI_LOCALNRANKS");
  if (size != local_size && !environment.has("MASTER_PORT")) {
    throw InvalidArgument(
        "mpiexec does not tell its processes which job they belong to, so no port can be derived from that: set one "
        "with mpiexec -genv MASTER_PORT <port>");
  }
  return {"Hydra",
          environment.count("PMI_RANK"),
          size,
          environment.count("MPI_LOCALRANKID"),
          local_size,
          environment.master_addr(size == local_size, "mpiexec -genv MASTER_ADDR <host of rank 0>"),
          environment.master_port(parent())};
}

Launch of_slurm(const Environment& environment) {
  const int size = environment.count("SLURM_STEP_NUM_TASKS", environment.number("SLURM_NTASKS", 1));
  std::string tasks = environment.first_of("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE");
  if (tasks.empty()) tasks = std::to_string(size);
  std::string address = environment.text("MASTER_ADDR");
  if (address.empty()) {
    const std::string nodes = environment.first_of("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST");
    if (nodes.empty()) throw InvalidArgument("SLURM_STEP_NODELIST is not set: set MASTER_ADDR to the host of rank 0");
    address = first_host(nodes);
  }
  return {"Slurm",
          environment.count("SLURM_PROCID"),
          size,
          environment.count("SLURM_LOCALID"),
          tasks_of_node(tasks, environment.number("SLURM_NODEID", 0)),
          address,
          environment.master_port(environment.text("SLURM_JOB_ID") + '.' + environment.text("SLURM_STEP_ID"))};
}

}  // namespace

Launch find_launch(const std::function<std::string(const char*)>& lookup) {
  const Environment environment(lookup);
  if (environment.has("RANK") && environment.has("WORLD_SIZE")) return of_torchrun(environment);
  if (environment.has("OMPI_COMM_WORLD_RANK")) return of_open_mpi(environment);
  const bool slurm =
      environment.has("SLURM_PROCID") && environment.number("SLURM_STEP_ID", kSpecialSteps) < kSpecialSteps;
  // srun --mpi=pmi2 sets PMI_* as mpiexec does, but no numbers on the node.
  if (environment.has("PMI_RANK") && (environment.has("MPI_LOCALNRANKS") || !slurm)) return of_hydra(environment);
  if (slurm) return of_slurm(environment);
  // Some environments set WORLD_SIZE=1 for a job of one.
  if (environment.has("RANK")) {
    throw InvalidArgument("RANK is set, but not WORLD_SIZE: set both, or neither for a job of this process alone");
  }
  if (environment.has("WORLD_SIZE") && environment.number("WORLD_SIZE") != 1) {
    throw InvalidArgument("WORLD_SIZE is set, but not RANK: set both, or neither for a job of this process alone");
  }
  return {};
}

}  // namespace ours
