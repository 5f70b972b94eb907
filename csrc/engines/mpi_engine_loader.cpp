#include <string>

#include "common/error.h"
#include "common/options.h"
#include "common/own_library.h"
#include "engines/mpi_engine.h"
#include "engines/mpi_meeting.h"
#include "engines/mpi_plan.h"

namespace ours {

namespace {

using Open = decltype(&ours_open_mpi_engine);

Open load() {
  const std::string path = find_own_library("_mpi");
  if (path.empty()) {
    throw Error(
        "this copy of ourddp was built without MPI (there is no _mpi library in " + own_folder() +
        "). In its source folder, OURS_WITH_MPI=1 pip install '.[mpi]' builds it with the MPI that is there, or "
        "with Open MPI, which it brings along");
  }
  void* library = nullptr;
  try {
    library = load_library(path);
  } catch (const Error& e) {
    throw Error(std::string("the MPI that this copy of ourddp was built with cannot be loaded: ") + e.what() +
                ". Install it again, or build again with the one that is there");
  }
  const auto open = reinterpret_cast<Open>(symbol_of(library, kOpenMpiEngine));
  if (open == nullptr) throw Error(path + " does not belong to this copy of ourddp: build it again");
  return open;
}

}  // namespace

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

std::string mpi_obstacle() {
  try {
    load();
  } catch (const Error& e) {
    return e.what();
  }
  return "";
}

std::shared_ptr<Engine> make_mpi_engine(int rank, int size, const std::string& group, std::shared_ptr<KeyValues> keys,
                                        Deadline deadline) {
  const MpiMeeting meeting = {rank, size, group, std::move(keys), deadline, find_mpi_launcher()};
  Open open = nullptr;
  try {
    open = load();
  } catch (const Error& e) {
    // The other ranks wait for what this one reports.
    mpi::agree(meeting, mpi::RankInfo::failure(e.what()));
    throw;
  }
  return std::shared_ptr<Engine>(open(meeting));
}

}  // namespace ours
