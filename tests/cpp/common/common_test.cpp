#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <set>
#include <string>

#include "common/deadline.h"
#include "common/dtype.h"
#include "common/error.h"
#include "common/owning_process.h"
#include "support/testing.h"

namespace ours {
namespace {

TEST(dtype_sizes_and_names_are_those_of_pytorch) {
  CHECK_EQ(size_of(DType::Bool), 1u);
  CHECK_EQ(size_of(DType::Int16), 2u);
  CHECK_EQ(size_of(DType::BFloat16), 2u);
  CHECK_EQ(size_of(DType::Float32), 4u);
  CHECK_EQ(size_of(DType::Complex32), 4u);
  CHECK_EQ(size_of(DType::Int64), 8u);
  CHECK_EQ(size_of(DType::Complex128), 16u);
  CHECK_EQ(size_of(DType::Float8E8M0FNU), 1u);
  CHECK_EQ(std::string(name_of(DType::BFloat16)), "bfloat16");
  CHECK_EQ(std::string(name_of(DType::Float8E4M3FN)), "float8_e4m3fn");
}

TEST(dtype_names_are_distinct_and_sizes_positive) {
  std::set<std::string> names;
  for (int i = 0; i <= static_cast<int>(DType::Opaque8); ++i) {
    CHECK(size_of(static_cast<DType>(i)) > 0);
    CHECK(names.insert(name_of(static_cast<DType>(i))).second);
  }
}

TEST(dtype_from_a_corrupt_message_is_named_unknown) {
  CHECK_EQ(size_of(static_cast<DType>(200)), 0u);
  CHECK_EQ(std::string(name_of(static_cast<DType>(200))), "unknown");
}

TEST(system_error_says_what_and_why) {
  const SystemError error("cannot map 4096 bytes", ENOMEM);
  CHECK_CONTAINS(error.what(), "cannot map 4096 bytes: ");
  CHECK_CONTAINS(error.what(), "Cannot allocate memory");
  CHECK_CONTAINS(error.what(), std::to_string(ENOMEM));
}

TEST(errors_can_be_told_apart) {
  CHECK_THROWS(InvalidArgument, throw InvalidArgument("x"));
  CHECK_EQ(CHECK_THROWS(Error, throw PeerError("rank 2 died")), "rank 2 died");
  CHECK_THROWS(testing::Failure, CHECK_THROWS(TimeoutError, throw PeerError("x")));
}

TEST(deadline_passes_and_keeps_its_timeout) {
  using std::chrono::milliseconds;
  CHECK(Deadline::after(milliseconds(0)).passed());
  CHECK(Deadline::after(milliseconds(-5)).passed());
  const auto later = Deadline::after(std::chrono::hours(1));
  CHECK(!later.passed());
  CHECK_EQ(later.timeout().count(), 3600 * 1000);
  CHECK(later.at() > Clock::now());
  // The largest timeout must not wrap round into the past.
  CHECK(!Deadline::after(milliseconds::max()).passed());
  CHECK(Deadline::after(milliseconds::max()).at() > Clock::now() + std::chrono::hours(24 * 365));
  CHECK(Deadline::after(milliseconds::min()).passed());
}

TEST(a_forked_child_is_not_the_owning_process) {
  const OwningProcess owner;
  CHECK(owner.is_here());
  const pid_t child = ::fork();
  if (child == 0) ::_exit(owner.is_here() || !OwningProcess().is_here() ? 1 : 0);
  int status = -1;
  CHECK_EQ(::waitpid(child, &status, 0), child);
  CHECK_EQ(status, 0);
  CHECK(owner.is_here());
}

}  // namespace
}  // namespace ours
