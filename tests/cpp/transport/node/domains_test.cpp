#include "transport/node/domains.h"

#include "support/node_ranks.h"

namespace ours::testing {
namespace {

std::vector<int> order_of(const Domains& domains) {
  std::vector<int> order;
  for (int place = 0; place < domains.first(domains.count()); ++place) {
    order.push_back(domains.rank_at(place));
    CHECK_EQ(domains.place_of(order.back()), place);
  }
  return order;
}

TEST(ranks_of_one_key_are_a_domain) {
  const Domains domains({7, 3, 7, 3, 3, 7, 7});
  CHECK_EQ(domains.count(), 2);
  CHECK(order_of(domains) == (std::vector<int>{0, 2, 5, 6, 1, 3, 4}));
  CHECK_EQ(domains.domain_of(5), 0);
  CHECK_EQ(domains.domain_of(4), 1);
  CHECK_EQ(domains.first(1), 4);
  CHECK_EQ(domains.size(0), 4);
  CHECK_EQ(domains.smallest(), 3);
}

TEST(there_is_one_domain_if_some_rank_has_no_key_or_too_few_have_the_same) {
  for (const Domains& one : {Domains({1, -1, 0}), Domains({0, 0, 1}, 2), Domains({4}), Domains({-1, -1})}) {
    CHECK_EQ(one.count(), 1);
    CHECK_EQ(one.smallest(), one.size(0));
    CHECK_EQ(one.domain_of(0), 0);
  }
  CHECK_EQ(Domains({0, 0, 1, 1}, 2).count(), 2);
  CHECK(order_of(Domains({1, -1, 0})) == (std::vector<int>{0, 1, 2}));
}

TEST(domains_together_keep_the_order) {
  const Domains one = Domains({0, 1, 0, 1}).together();
  CHECK_EQ(one.count(), 1);
  CHECK_EQ(one.size(0), 4);
  CHECK_EQ(one.domain_of(1), 0);
  CHECK(order_of(one) == (std::vector<int>{0, 2, 1, 3}));
}

TEST(ranks_are_divided_into_domains_of_equal_size) {
  CHECK(Domains::equal(4, 2) == (std::vector<int>{0, 0, 1, 1}));
  CHECK(Domains::equal(7, 3) == (std::vector<int>{0, 0, 0, 1, 1, 2, 2}));
  CHECK(Domains::equal(2, 64) == (std::vector<int>{0, 1}));
}

/// The domains of ranks that are bound to those sockets.
Domains domains_of(const std::vector<int>& sockets) {
  const auto ranks = static_cast<int>(sockets.size());
  Sessions sessions{NodeSession::create(0, ranks, NodeConfig{4096, 4096})};
  for (int r = 1; r < ranks; ++r) sessions.push_back(std::make_shared<NodeSession>(r, ranks, sessions[0]->memory()));
  for (int r = 0; r < ranks; ++r) sessions[0]->block(r).socket = sockets[static_cast<size_t>(r)];
  for (const auto& session : sessions) session->wait_attached(Deadline::after(std::chrono::seconds(30)), [] {});
  return sessions.back()->domains();
}

TEST(ranks_that_are_bound_to_sockets_are_divided_by_them) {
  CHECK(order_of(domains_of({0, 1, 0, 1, 0, 1, 0, 1})) == (std::vector<int>{0, 2, 4, 6, 1, 3, 5, 7}));
  CHECK_EQ(domains_of({0, 1, 0, 1, 0, 1, 0, 1}).count(), 2);
  CHECK_EQ(domains_of({0, 0, 0, 0, 1, 1, 1, -1}).count(), 1);
  CHECK_EQ(domains_of({0, 0, 0, 0, 1, 1, 1}).count(), 1);
}

TEST(a_process_has_a_socket_if_all_its_cpus_are_on_one) {
  CHECK_EQ(socket_of_all({}), -1);
  CHECK_EQ(socket_of_all({0}), socket_of(0));
  CHECK_EQ(socket_of_all({0, static_cast<int>(kMostCores)}), -1);
}

}  // namespace
}  // namespace ours::testing
