#include "transport/node/own_cores.h"

#include <vector>

#include "support/testing.h"

namespace ours::testing {
namespace {

/// Ranks, each of which may run on the cores given for it.
std::vector<CoreShare> shares(const std::vector<std::vector<size_t>>& cores, uint32_t quota = 1000) {
  std::vector<CoreShare> all;
  for (const auto& each : cores) {
    CoreShare share{};
    for (const size_t core : each) share.allowed[core / 64] |= uint64_t{1} << core % 64;
    share.quota = quota;
    all.push_back(share);
  }
  return all;
}

TEST(ranks_have_cores_of_their_own_if_there_is_one_for_each) {
  CHECK(have_own_cores(shares({{0, 1}, {0, 1}})));
  CHECK(!have_own_cores(shares({{0, 1}, {0, 1}, {0, 1}})));
  CHECK(have_own_cores(shares({{5}, {70}, {1023}})));
  CHECK(!have_own_cores(shares({{5}, {70}, {5}})));
  CHECK(have_own_cores(shares({{0, 1, 2}, {0, 1}, {0}})));
  CHECK(!have_own_cores(shares({{}})));
  const std::vector<size_t> many = {0, 1, 2, 3, 4, 5, 6, 7};
  CHECK(have_own_cores(shares({many, many, many, many}, 4)));
  CHECK(!have_own_cores(shares({many, many, many, many}, 3)));
  CHECK_EQ(have_own_cores({own_share()}), own_share().quota >= 1);
}

}  // namespace
}  // namespace ours::testing
