#include "common/other_failures.h"

#include "support/testing.h"
#include "transport/group_failure.h"

namespace ours::testing {
namespace {

TEST(a_failure_is_a_reason_for_leaving_groups_that_were_made_before_it) {
  const Clock::time_point before = Clock::now();
  GroupFailure failed;
  failed.record(FailureKind::Timeout, "enough");
  CHECK_EQ(failure_since(before), std::string("enough"));
  CHECK_EQ(failure_since(Clock::now()), std::string());
  CHECK_EQ(describe_reason("rank 1", ""), std::string());
}

TEST(a_long_reason_is_cut_between_characters) {
  remember_failure(std::string(kMaxReason - 1, 'x') + "\u00e4");
  CHECK_EQ(failure_since(Clock::time_point()), std::string(kMaxReason - 1, 'x'));
}

}  // namespace
}  // namespace ours::testing
