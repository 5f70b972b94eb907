#include "common/own_name.h"

#include <unistd.h>

#include <algorithm>

namespace ours {

std::string host_name() {
  char name[256] = {};
  ::gethostname(name, sizeof(name) - 1);
  std::string text = name;
  std::replace_if(text.begin(), text.end(), [](unsigned char c) { return c <= ' '; }, '_');
  return text.empty() ? "unknown" : text;
}

std::string process_name(const std::string& host, int pid) {
  return "(host " + host + ", pid " + std::to_string(pid) + ")";
}

std::string describe_own(int rank) {
  return "rank " + std::to_string(rank) + ' ' + process_name(host_name(), ::getpid());
}

}  // namespace ours
