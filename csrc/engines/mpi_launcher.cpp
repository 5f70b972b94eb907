#include <string>

#include "common/options.h"
#include "engines/mpi_meeting.h"

namespace ours {

MpiLauncher find_mpi_launcher() {
  const auto rank = [](const char* name) {
    const std::string text = launcher_variable(name);
    return text.empty() || text.size() > 9 || text.find_first_not_of("0123456789") != std::string::npos
               ? -1
               : std::stoi(text);
  };
  if (const int found = rank("PMIX_RANK"); found >= 0) return {"PMIx " + launcher_variable("PMIX_NAMESPACE"), found};
  // Hydra does not name its jobs, but Slurm does when it takes Hydra's role.
  if (const int found = rank("PMI_RANK"); found >= 0) return {"PMI " + launcher_variable("PMI_JOBID"), found};
  return {};
}

}  // namespace ours
