#include <cerrno>
#include <chrono>
#include <string>

#include "common/deadline.h"
#include "common/dtype.h"
#include "common/error.h"
#include "common/owning_process.h"
#include "support/children.h"
#include "support/testing.h"

namespace ours::testing {
namespace {

TEST(dtype_sizes_and_names_are_those_of_pytorch) {
  CHECK_EQ(size_of(DType::BFloat16), 2u);
  CHECK_EQ(size_of(DType::Complex128), 16u);
  CHECK_EQ(size_of(DType::Float8E8M0FNU), 1u);
  CHECK_EQ(std::string(name_of(DType::BFloat16)), "bfloat16");
  CHECK_EQ(std::string(name_of(DType::Float8E4M3FN)), "float8_e4m3fn");
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
  CHECK(in_child([&] { return !owner.is_here() && OwningProcess().is_here(); }));
  CHECK(owner.is_here());
}

}  // namespace
}  // namespace ours::testing
