#include "transport/node/domains.h"

#include "support/node_ranks.h"

namespace ours::testing {
namespace {

std::vector<int> order_of(const Domains& domains) {
  std::vector<int> order;
  for (int domain = 0; domain < domains.count(); ++domain) {
    for (int i = 0; i < domains.size(domain); ++i) {
      const int rank = domains.rank_at(domain, i);
      CHECK_EQ(domains.domain_of(rank), domain);
      CHECK_EQ(domains.index_of(rank), i);
      CHECK_EQ(domains.place_of(rank), static_cast<int>(order.size()));
      CHECK_EQ(domains.rank_at(static_cast<int>(order.size())), rank);
      order.push_back(rank);
    }
  }
  return order;
}

TEST(ranks_of_one_key_are_a_domain) {
  const Domains domains({7, 3, 7, 3, 3, 7, 7});
  CHECK_EQ(domains.count(), 2);
  CHECK(order_of(domains) == (std::vector<int>{0, 2, 5, 6, 1, 3, 4}));
  CHECK_EQ(domains.domain_of(5), 0);
  CHECK_EQ(domains.domain_of(4), 1);
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
  const auto sizes = [](const Domains& domains) {
    std::vector<int> all;
    for (int domain = 0; domain < domains.count(); ++domain) all.push_back(domains.size(domain));
    return all;
  };
  CHECK(sizes(Domains::equal(4, 2)) == (std::vector<int>{2, 2}));
  CHECK(sizes(Domains::equal(7, 3)) == (std::vector<int>{3, 2, 2}));
  CHECK(sizes(Domains::equal(2, 64)) == (std::vector<int>{1, 1}));
  CHECK(order_of(Domains::equal(7, 3)) == (std::vector<int>{0, 1, 2, 3, 4, 5, 6}));
}

/// The domains of ranks that are bound to those sockets.
Domains domains_of(const std::vector<int>& sockets) {
  return make_sessions(static_cast<int>(sockets.size()), 4096, {true, 0, sockets}).back()->domains();
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
