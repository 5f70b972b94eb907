#include "transport/node/gate_tree.h"

#include <set>
#include <vector>

#include "support/testing.h"

namespace ours::testing {
namespace {

TEST(all_ranks_come_to_the_last_gate) {
  for (size_t ranks = 1; ranks < 300; ++ranks) {
    const GateTree tree(ranks);
    std::set<size_t> gates;
    for (size_t rank = 0; rank < ranks; ++rank) {
      size_t member = rank;
      for (size_t level = 0; level < tree.levels(); ++level) {
        const GateTree::Group group = tree.group(level, member);
        CHECK(group.first <= member && member < group.first + group.size && group.size <= GateTree::kWidth);
        CHECK(group.first + group.size <= tree.members(level));
        CHECK_EQ(group.gate, tree.gate(level, member / GateTree::kWidth));
        gates.insert(group.gate);
        member = member / GateTree::kWidth;
        CHECK_EQ(group.gate == tree.last_gate(), level + 1 == tree.levels());
      }
      CHECK_EQ(member, size_t{0});
    }
    CHECK_EQ(gates.size(), tree.gates());
  }
}

// All write what they show and come to gates. Who is the last at one reads what the others there show, and writes it
// down. In the end all read it at the last gate.
TEST(a_synchronisation_touches_a_few_lines_a_rank) {
  const size_t ranks = 64;
  const GateTree tree(ranks);
  size_t all = ranks;
  size_t of_the_last = 1;
  for (size_t level = 0; level < tree.levels(); ++level) {
    for (size_t first = 0; first < tree.members(level); first += GateTree::kWidth) {
      const size_t size = tree.group(level, first).size;
      all += size + (size - 1) + 1;
    }
    of_the_last += 1 + (GateTree::kWidth - 1) + 1;
  }
  all += ranks - 1;
  CHECK_EQ(all, size_t{295});
  CHECK_EQ(of_the_last, size_t{16});
}

}  // namespace
}  // namespace ours::testing
