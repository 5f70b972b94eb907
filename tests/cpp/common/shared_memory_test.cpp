#include "common/shared_memory.h"

#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>

#include "common/error.h"
#include "support/children.h"
#include "support/testing.h"

namespace ours::testing {
namespace {

TEST(shared_memory_is_private_unnamed_and_shared_by_its_path) {
  auto memory = SharedMemory::create(8192);
  struct stat info{};
  CHECK_EQ(::fstat(memory->fd(), &info), 0);
  CHECK_EQ(info.st_mode & 0777u, 0600u);
  CHECK_EQ(info.st_nlink, 0u);
  memory->reserve(0, 8192);
  auto again = SharedMemory::open("/proc/self/fd/" + std::to_string(memory->fd()));
  CHECK_EQ(again->bytes(), 8192u);
  memory->data()[8191] = std::byte{7};
  CHECK(again->data()[8191] == std::byte{7});
  CHECK_CONTAINS(CHECK_THROWS(SystemError, SharedMemory::open("/proc/self/fd/999999")), "No such file");
  CHECK_THROWS(SystemError, SharedMemory::open("/dev/null"));
}

TEST(memory_is_reserved_in_pieces_however_often_signals_interrupt_it) {
  // As where a timer ticks in the time that the system takes for 1 MiB, and whatever is interrupted is undone.
  size_t end = 4096;
  size_t calls = 0;
  const int error = reserve_in_pieces(4096, 50'000'000, [&](size_t offset, size_t bytes) {
    CHECK_EQ(offset, end);
    CHECK(++calls < 10'000);
    if (bytes > 1'000'000 || calls % 20 == 0) {
      errno = EINTR;
      return -1;
    }
    end += bytes;
    return 0;
  });
  CHECK_EQ(error, 0);
  CHECK_EQ(end, 50'004'096u);
  CHECK_EQ(reserve_in_pieces(0, 8192,
                             [](size_t, size_t) {
                               errno = ENOSPC;
                               return -1;
                             }),
           ENOSPC);
}

TEST(memory_that_cannot_all_be_reserved_is_given_back) {
  // The second piece would make the file larger than files may be.
  CHECK(in_child([] {
    constexpr rlim_t kLimit = rlim_t{20} << 20;
    ::signal(SIGXFSZ, SIG_IGN);
    const Fd file = make_memory_file("ours", 4096);
    const rlimit limit{kLimit, kLimit};
    ::setrlimit(RLIMIT_FSIZE, &limit);
    CHECK_CONTAINS(CHECK_THROWS(SystemError, reserve_memory(file.get(), 0, size_t{40} << 20)), "41943040");
    struct stat info{};
    return ::fstat(file.get(), &info) == 0 && info.st_blocks == 0;
  }));
}

TEST(memory_of_a_rank_alone_has_no_file) {
  const auto memory = SharedMemory::create_alone(8192);
  memory->reserve(0, 8192);
  memory->data()[8191] = std::byte{7};
  CHECK_EQ(memory->fd(), -1);
}

TEST(shared_memory_knows_how_much_was_taken_and_needs_no_descriptor) {
  constexpr size_t kPage = 4096;
  constexpr size_t kPages = 10'000;
  const auto memory = SharedMemory::create(kPages * kPage);
  const auto peer = SharedMemory::open("/proc/self/fd/" + std::to_string(memory->fd()));
  CHECK_EQ(memory->taken(), size_t{0});
  memory->reserve(10 * kPage, 7 * kPage);
  memory->data()[0] = std::byte{1};
  CHECK_EQ(memory->taken(), 8 * kPage);
  peer->close_file();
  memory->close_file();
  CHECK_EQ(memory->taken(), 8 * kPage);
  memory->reserve(9000 * kPage + 10, kPage);
  CHECK_EQ(memory->taken(), 10 * kPage);
  CHECK_EQ(peer->taken(), 10 * kPage);
  CHECK(peer->data()[0] == std::byte{1});
  CHECK_EQ(SharedMemory::create_alone(kPage)->taken(), size_t{0});
}

TEST(memory_that_cannot_be_reserved_without_its_file_is_refused) {
  // What lies behind the end of the file has no memory.
  const auto memory = SharedMemory::create(10 * 4096);
  CHECK_EQ(::ftruncate(memory->fd(), 4096), 0);
  memory->close_file();
  if (memory->fd() >= 0) return;  // an old system
  CHECK_CONTAINS(CHECK_THROWS(SystemError, memory->reserve(0, 8192)), "8192");
}

}  // namespace
}  // namespace ours::testing
