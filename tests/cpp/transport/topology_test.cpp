#include "transport/topology.h"

#include <numeric>

#include "common/error.h"
#include "support/children.h"
#include "support/testing.h"
#include "transport/node/node_probe.h"

namespace ours::testing {
namespace {

TEST(nodes_are_numbered_by_their_lowest_ranks) {
  const Topology topology = Topology::of({3, 4, 4, 3, 4, 5});
  CHECK_EQ(topology.size(), 6);
  CHECK_EQ(topology.nodes(), 3);
  const std::vector<int> nodes{0, 1, 1, 0, 1, 2};
  for (int rank = 0; rank < 6; ++rank) CHECK_EQ(topology.node_of(rank), nodes[static_cast<size_t>(rank)]);
  CHECK(topology.ranks_of(0) == (std::vector<int>{0, 3}));
  CHECK(topology.ranks_of(1) == (std::vector<int>{1, 2, 4}));
  CHECK(topology.ranks_of(2) == (std::vector<int>{5}));
  CHECK_EQ(topology.local_rank_of(3), 1);
  CHECK_EQ(topology.local_rank_of(4), 2);
  CHECK_EQ(topology.local_rank_of(5), 0);
  CHECK_EQ(topology.leader_of(1), 4);
}

TEST(a_rank_has_counterparts_on_other_nodes) {
  const Topology topology = Topology::of({0, 0, 0, 3, 3, 5, 5});  // nodes of 3, 2 and 2 ranks
  CHECK(topology.counterparts(0, 2) == (std::vector<int>{3, 5}));
  CHECK(topology.counterparts(1, 2) == (std::vector<int>{4, 6}));
  CHECK(topology.counterparts(2, 2) == (std::vector<int>{3, 5}));  // which has none of equal place
  CHECK(topology.counterparts(4, 2) == (std::vector<int>{1, 6}));
  // Of ten nodes, those 1, 2, 4 and 8 away in both directions.
  std::vector<int> each(10);
  std::iota(each.begin(), each.end(), 0);
  const Topology ring = Topology::of(each);
  CHECK_EQ(ring.counterparts(3, 9).size(), size_t{9});
  CHECK(ring.counterparts(3, 8) == (std::vector<int>{1, 2, 4, 5, 7, 9}));
  CHECK(Topology::of({0, 0}).counterparts(1, 9).empty());
}

TEST(a_topology_survives_its_way_through_the_store) {
  for (const std::vector<int>& leaders : std::vector<std::vector<int>>{{0}, {0, 0}, {0, 1}, {2, 1, 2, 1, 4}}) {
    const Topology there = Topology::of(leaders);
    const Topology here = Topology::parse(there.text(), there.size());
    CHECK_EQ(here.nodes(), there.nodes());
    for (int rank = 0; rank < there.size(); ++rank) {
      CHECK_EQ(here.node_of(rank), there.node_of(rank));
      CHECK_EQ(here.leader_of(rank), there.leader_of(rank));
    }
  }
}

TEST(what_is_no_topology_is_refused) {
  CHECK_CONTAINS(CHECK_THROWS(Error, Topology::of({1, 0})), "rank 0");
  CHECK_CONTAINS(CHECK_THROWS(Error, Topology::of({0, 2})), "rank 2");
  CHECK_THROWS(Error, Topology::of({-1}));
  const std::string text = Topology::of({0, 0}).text();
  const std::vector<std::string> wrongs{"", text + " 0", text + " x", "something 0 0", text.substr(0, 3)};
  for (const std::string& wrong : wrongs) {
    CHECK_CONTAINS(CHECK_THROWS(Error, Topology::parse(wrong, 2)), "malformed");
  }
}

TEST(ranks_with_different_node_ids_are_never_candidates_for_one_node) {
  CHECK_EQ(node_identity("a"), node_identity("a"));
  CHECK(node_identity("a") != node_identity("b"));
  CHECK(node_identity("a") != node_identity(""));
  // It must be usable in a key, whatever the text.
  CHECK(node_identity("two\nlines /").find_first_not_of("0123456789abcdef") == std::string::npos);
}

TEST(a_probe_is_believed_only_where_its_number_is_found) {
  const NodeProbe probe, other;
  CHECK_EQ(NodeProbe::obstacle(probe.address()), std::string());
  // The address refers to other memory here, as in another process namespace.
  const std::string mine = probe.address(), theirs = other.address();
  const size_t place = mine.find(' ', mine.find(' ') + 1);
  const size_t number = theirs.find(' ', theirs.find(' ') + 1);
  CHECK_CONTAINS(NodeProbe::obstacle(mine.substr(0, place) + theirs.substr(number)), "another");
  CHECK_CONTAINS(NodeProbe::obstacle("0 1 2 3"), "/proc/0");
  CHECK_CONTAINS(NodeProbe::obstacle("nonsense"), "malformed");
}

TEST(a_probe_is_found_from_another_process) {
  const NodeProbe probe;
  const std::string address = probe.address();
  CHECK(in_child([&] { return NodeProbe::obstacle(address).empty(); }));
}

}  // namespace
}  // namespace ours::testing
