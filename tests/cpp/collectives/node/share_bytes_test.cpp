#include "collectives/node/node_algorithms.h"
#include "support/testing.h"

namespace ours::testing {
namespace {

TEST(all_ranks_have_a_share_of_what_is_reduced_in_the_heap) {
  constexpr size_t kMiB = size_t{1} << 20;
  CHECK(kMiB / node::share_bytes(kMiB, 64) >= 64);
  CHECK(kMiB / node::share_bytes(kMiB, 192) >= 192);
  CHECK_EQ(node::share_bytes(25 * kMiB, 4), size_t{128} * 1024);
  CHECK_EQ(node::share_bytes(64 * 1024, 64), size_t{4} * 1024);  // less would not repay taking one
  CHECK_EQ(node::share_bytes(0, 2), size_t{4} * 1024);
}

}  // namespace
}  // namespace ours::testing
