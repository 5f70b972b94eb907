#include "common/process_memory.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <vector>

#include "support/testing.h"

namespace ours::testing {
namespace {

TEST(memory_of_this_process_can_be_read_like_that_of_another) {
  const std::vector<int> data(100000, 7);
  std::vector<int> copy(data.size());
  const auto address = reinterpret_cast<uint64_t>(data.data());
  const int error = read_process_memory(::getpid(), copy.data(), address, data.size() * sizeof(int));
  CHECK(error == 0 ? copy == data : error == EPERM || error == ENOSYS);  // a container may forbid it
}

TEST(what_cannot_be_read_is_told) {
  char known = 0;
  if (!is_readable_by_others(&known, 1)) return;  // a container forbids it
  void* const closed = ::mmap(nullptr, 4096, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  CHECK(closed != MAP_FAILED);
  char byte = 0;
  CHECK_EQ(read_process_memory(::getpid(), &byte, reinterpret_cast<uint64_t>(closed), 1), EFAULT);
  CHECK(!is_readable_by_others(closed, 1));
  CHECK(is_readable_by_others(&byte, 1));
  CHECK(is_readable_by_others(nullptr, 0));
  for (const size_t others : {0, 1, 63, 64, 65, 500}) {
    ReadableByOthers readable;
    for (size_t i = 0; i < others; ++i) readable.add(&byte, 1);
    CHECK(readable.all());
    readable.add(closed, 4096);
    for (size_t i = 0; i < others; ++i) readable.add(&byte, 1);
    CHECK(!readable.all());
  }
  ::munmap(closed, 4096);
}

}  // namespace
}  // namespace ours::testing
