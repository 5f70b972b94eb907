#include "transport/roll_call.h"

#include "support/testing.h"

namespace ours::testing {
namespace {

TEST(ranks_that_answer_the_same_share_a_line) {
  const AskedProcess self = own_whereabouts();
  const AskedProcess nowhere{self.pid, -1, 0};
  CHECK_EQ(roll_call({}), std::string());
  CHECK_EQ(roll_call({{3, self}, {4, nowhere}, {7, self}}),
           std::string("\nEach of ranks 3, 7 runs, but cannot tell where it is\nRank 4 cannot be asked where it is"));
}

TEST(of_many_ranks_the_first_are_asked) {
  std::vector<AskedRank> ranks;
  for (int r = 0; r < 20; ++r) ranks.push_back({r, own_whereabouts()});
  CHECK_EQ(roll_call(ranks), std::string("\nEach of ranks 0, 1, 2, 3, 4, 5, 6, 7 runs, but cannot tell where it is"));
}

}  // namespace
}  // namespace ours::testing
