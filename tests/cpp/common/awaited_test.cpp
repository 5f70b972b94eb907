#include "common/awaited.h"

#include "support/testing.h"

namespace ours::testing {
namespace {

TEST(those_for_whom_calls_wait_are_known_until_the_calls_end) {
  {
    Awaited call;
    call.set("rank 1");
    CHECK_EQ(describe_awaited(), std::string("; it waits for rank 1"));
    Awaited other;
    other.set("rank 2, rank 3");
    call.set("rank 4");
    CHECK_CONTAINS(describe_awaited(), "rank 4");
    CHECK_CONTAINS(describe_awaited(), " and for ");
    call.set("");
    CHECK_EQ(describe_awaited(), std::string("; it waits for rank 2, rank 3"));
  }
  CHECK_EQ(describe_awaited(), std::string());
}

}  // namespace
}  // namespace ours::testing
