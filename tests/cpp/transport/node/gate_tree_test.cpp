#include "transport/node/gate_tree.h"

#include <map>

#include "support/testing.h"

namespace ours::testing {
namespace {

TEST(all_ranks_come_to_the_last_gate) {
  for (size_t ranks = 1; ranks < 300; ++ranks) {
    const GateTree tree(ranks);
    std::map<size_t, size_t> came;  // how many members have come to a gate
    for (size_t level = 0; level < tree.levels(); ++level) {
      for (size_t member = 0; member < tree.members(level); ++member) {
        const size_t gate = tree.gate_of(level, member);
        came[gate] += tree.is_alone(level, member) ? 2 : 1;
        CHECK_EQ(gate == tree.last_gate(), level + 1 == tree.levels());
        // Who goes on from a gate is the member of the next level that this gate is.
        if (level + 1 < tree.levels()) CHECK_EQ(tree.gate_that_is(level + 1, member / 2), gate);
      }
    }
    CHECK_EQ(came.size(), tree.gates());
    for (const auto& [gate, members] : came) CHECK_EQ(members, size_t{2});
  }
}

// A rank has a line of its own. It comes to a gate and reads or writes one line there; a second one only if both come
// within the moment in which the first writes. All read one line at last.
TEST(a_synchronisation_touches_a_few_lines_a_rank) {
  const size_t ranks = 64;
  const GateTree tree(ranks);
  size_t comes = 0;
  for (size_t level = 0; level < tree.levels(); ++level) comes += tree.members(level);
  CHECK_EQ(ranks + comes + ranks, size_t{254});
  CHECK_EQ(1 + tree.levels() + 1, size_t{8});  // of a rank that is the second at each gate
}

}  // namespace
}  // namespace ours::testing
