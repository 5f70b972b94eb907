#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>

#include "common/shared_memory.h"
#include "support/device_contract.h"
#include "support/testing.h"

extern char** environ;

// Memory of one process, mapped by another: this program is started once more and runs only the second test below.

namespace ours {
namespace {

using testing::OnDevice;

constexpr const char* kHandleVariable = "DEVICE_TEST_HANDLE";
constexpr const char* kChild = "device_child_writes_what_its_parent_reads";
constexpr size_t kBytes = size_t{3} << 20;  // more than one large page

/// The exit status of this program with `argument`, or -1 if it had to be killed.
int run_self(const char* argument) {
  std::string program = "/proc/self/exe", only = argument;
  char* arguments[] = {program.data(), only.data(), nullptr};
  pid_t child = 0;
  if (posix_spawn(&child, program.c_str(), nullptr, nullptr, arguments, environ) != 0) return -1;
  const auto limit = Deadline::after(std::chrono::seconds(60));
  for (int status = 0;;) {
    if (waitpid(child, &status, limit.passed() ? 0 : WNOHANG) == child) {
      return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
    }
    if (limit.passed()) kill(child, SIGKILL);
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
}

TEST(device_memory_can_be_written_by_another_process) {
  OnDevice on(kBytes);
  const std::vector<char> before(kBytes, 'p');
  on.put(on.at(0), before.data(), kBytes);
  const MemoryHandle handle = on.device->share(on.at(0));
  const auto told = SharedMemory::create(handle.size());
  std::memcpy(told->data(), handle.data(), handle.size());
  const std::string path = "/proc/" + std::to_string(::getpid()) + "/fd/" + std::to_string(told->fd());
  setenv(kHandleVariable, path.c_str(), 1);
  const int status = run_self(kChild);
  unsetenv(kHandleVariable);
  CHECK_EQ(status, 0);
  const std::vector<char> after = on.get(on.at(0), kBytes);
  CHECK_EQ(after[0], 'c');
  CHECK_EQ(after[kBytes / 2], 'p');
  CHECK_EQ(after[kBytes - 1], 'c');
}

TEST(device_child_writes_what_its_parent_reads) {
  const char* path = std::getenv(kHandleVariable);
  if (path == nullptr) return;
  OnDevice on(kBytes);
  MemoryHandle handle{};
  std::memcpy(handle.data(), SharedMemory::open(path)->data(), handle.size());
  const auto mapped = on.device->map(handle);
  auto* data = static_cast<char*>(mapped.get());
  CHECK(on.get(data, kBytes) == std::vector<char>(kBytes, 'p'));
  const char mark = 'c';
  on.put(data, &mark, 1);
  on.put(data + kBytes - 1, &mark, 1);
}

TEST(device_says_what_it_cannot_map) {
  const auto device = testing::contract_device();
  MemoryHandle nonsense{};
  nonsense.fill(0x5a);
  CHECK_THROWS(DeviceError, device->map(nonsense));
}

}  // namespace
}  // namespace ours
