#include "common/own_library.h"

#include <dlfcn.h>

#include <filesystem>
#include <system_error>

#include "common/error.h"

namespace ours {

std::string own_folder() {
  static const char kHere = 0;
  Dl_info info{};
  if (dladdr(&kHere, &info) == 0 || info.dli_fname == nullptr) return ".";
  const std::string path = info.dli_fname;
  const size_t slash = path.rfind('/');
  return slash == std::string::npos ? "." : path.substr(0, slash);
}

std::string find_own_library(const std::string& name) {
  const std::string start = name + '.';
  std::error_code unreadable;
  for (const auto& entry : std::filesystem::directory_iterator(own_folder(), unreadable)) {
    const std::string file = entry.path().filename().string();
    if (file.rfind(start, 0) == 0 && entry.path().extension() == ".so") return entry.path().string();
  }
  return "";
}

void* load_library(const std::string& path) {
  // Never closed: MPI cannot be started twice in a process, and devices have threads, streams and memory, and code that
  // runs when the process ends.
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library != nullptr) return library;
  const char* reason = dlerror();  // NOLINT(concurrency-mt-unsafe): glibc keeps one for each thread
  throw Error(reason == nullptr ? path + " cannot be loaded" : reason);
}

void* symbol_of(void* library, const char* symbol) { return dlsym(library, symbol); }

}  // namespace ours
