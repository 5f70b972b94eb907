#include "collectives/exchange_plan.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <vector>

#include "common/error.h"
#include "support/testing.h"

namespace ours::testing {
namespace {

using Sizes = std::vector<uint64_t>;

Sizes sizes_of(const ExchangePlan& plan) {
  Sizes table(2 * plan.sends.size());
  plan.write_sizes(table.data());
  return table;
}

std::vector<bool> present(const ExchangePlan& plan) {
  std::vector<bool> there;
  for (const auto& span : plan.sends) there.push_back(span.has_value());
  for (const auto& span : plan.receives) there.push_back(span.has_value());
  return there;
}

TEST(plan_of_a_broadcast_with_the_root_first_and_last) {
  std::array<char, 6> data{};
  for (const int root : {0, 2}) {
    for (int rank = 0; rank < 3; ++rank) {
      const ExchangePlan plan = Planner{Op::Broadcast, rank, 3}.broadcast({data.data(), 6}, root);
      CHECK(plan.is_common());
      CHECK_EQ(plan.root, root);
      CHECK(plan.buffer().data == data.data());
      for (int r = 0; r < 3; ++r) {
        const auto peer = static_cast<size_t>(r);
        CHECK_EQ(plan.sends[peer].has_value(), rank == root);
        CHECK_EQ(plan.receives[peer].has_value(), r == root);
      }
    }
  }
}

TEST(plan_of_an_all_gather_with_uneven_and_empty_sizes) {
  std::array<char, 9> data{};
  const std::vector<Span> outputs = {{data.data(), 4}, {data.data() + 4, 0}, {data.data() + 4, 5}};
  const ExchangePlan first = Planner{Op::AllGather, 0, 3}.all_gather({data.data(), 4}, outputs);
  CHECK(sizes_of(first) == (Sizes{4, 4, 4, 4, 0, 5}));
  const ExchangePlan second = Planner{Op::AllGather, 1, 3}.all_gather({nullptr, 0}, outputs);
  // An empty message is still a message.
  CHECK(present(second) == std::vector<bool>(6, true));
  CHECK(sizes_of(second) == (Sizes{0, 0, 0, 4, 0, 5}));
}

TEST(plans_of_gather_and_scatter_are_each_others_mirror) {
  std::array<char, 6> data{};
  const std::vector<Span> outputs = {{data.data(), 1}, {data.data() + 1, 2}, {data.data() + 3, 3}};
  const std::vector<ConstSpan> inputs = {{data.data(), 1}, {data.data() + 1, 2}, {data.data() + 3, 3}};
  for (const int root : {0, 2}) {
    for (int rank = 0; rank < 3; ++rank) {
      const auto me = static_cast<size_t>(rank);
      const ExchangePlan gathered =
          Planner{Op::Gather, rank, 3}.gather(inputs[me], rank == root ? outputs : std::vector<Span>{}, root);
      const ExchangePlan scattered =
          Planner{Op::Scatter, rank, 3}.scatter(rank == root ? inputs : std::vector<ConstSpan>{}, outputs[me], root);
      CHECK(gathered.is_common());
      CHECK(!scattered.is_common());
      for (size_t r = 0; r < 3; ++r) {
        CHECK_EQ(gathered.sends[r].has_value(), static_cast<int>(r) == root);
        CHECK_EQ(gathered.receives[r].has_value(), rank == root);
        CHECK_EQ(gathered.sent(r), scattered.received(r));
        CHECK_EQ(gathered.received(r), scattered.sent(r));
      }
    }
  }
}

TEST(plan_of_one_rank_copies_what_it_gives_itself) {
  std::array<char, 4> from = {'a', 'b', 'c', 'd'};
  std::array<char, 4> to{};
  const ExchangePlan plan = Planner{Op::AllToAll, 0, 1}.all_to_all({{from.data(), 4}}, {{to.data(), 4}});
  plan.copy_own(0);
  CHECK(from == to);
  const ExchangePlan empty = Planner{Op::AllToAll, 0, 1}.all_to_all({{}}, {{}});
  empty.copy_own(0);
}

TEST(plan_in_place_copies_nothing_but_sends_copies) {
  std::array<char, 4> data = {'a', 'b', 'c', 'd'};
  const std::vector<ConstSpan> inputs = {{data.data(), 2}, {data.data() + 2, 2}};
  const std::vector<Span> same = {{data.data(), 2}, {data.data() + 2, 2}};
  const ExchangePlan in_place = Planner{Op::AllToAll, 0, 2}.all_to_all(inputs, same);
  in_place.copy_own(0);
  CHECK_EQ(std::string(data.data(), 4), std::string("abcd"));
  CHECK(in_place.overlaps(1));

  std::array<char, 4> other{};
  const std::vector<Span> outputs = {{other.data(), 2}, {other.data() + 2, 2}};
  CHECK(!(Planner{Op::AllToAll, 0, 2}.all_to_all(inputs, outputs).overlaps(1)));
  // Ranges that only touch do not overlap, and neither do empty ones.
  const std::vector<Span> behind = {{other.data(), 2}, {data.data(), 2}};
  CHECK(!(Planner{Op::AllToAll, 0, 2}.all_to_all(inputs, behind).overlaps(1)));
  CHECK(!(Planner{Op::Scatter, 1, 2}.scatter({}, {data.data(), 2}, 0).overlaps(0)));
}

TEST(plan_is_uniform_where_all_sizes_are_one) {
  std::array<char, 8> data{};
  const std::vector<ConstSpan> inputs = {{data.data(), 2}, {data.data(), 2}};
  const std::vector<Span> even = {{data.data(), 2}, {data.data(), 2}};
  const std::vector<Span> uneven = {{data.data(), 2}, {data.data(), 3}};
  CHECK((Planner{Op::AllToAll, 0, 2}.all_to_all(inputs, even).is_uniform(2)));
  CHECK(!(Planner{Op::AllToAll, 0, 2}.all_to_all(inputs, even).is_uniform(1)));
  CHECK(!(Planner{Op::AllToAll, 0, 2}.all_to_all(inputs, uneven).is_uniform(2)));
  CHECK(!(Planner{Op::Gather, 1, 2}.gather({data.data(), 2}, {}, 0).is_uniform(2)));
}

TEST(planner_refuses_what_has_no_meaning) {
  std::array<char, 8> data{};
  const Planner planner{Op::GatherSingle, 1, 2};
  const ConstSpan two{data.data(), 2};
  const std::vector<Span> outputs = {{data.data(), 2}, {data.data(), 3}};
  CHECK_CONTAINS(CHECK_THROWS(InvalidArgument, planner.broadcast({}, 2)), "root is 2 in a group of 2 ranks");
  CHECK_CONTAINS(CHECK_THROWS(InvalidArgument, planner.scatter({}, {}, -1)), "root is -1");
  CHECK_CONTAINS(CHECK_THROWS(InvalidArgument, planner.gather(two, {}, 1)), "got 0 buffers in a group of 2 ranks");
  CHECK_CONTAINS(CHECK_THROWS(InvalidArgument, planner.all_to_all({two}, outputs)), "got 1 buffers");
  CHECK_CONTAINS(CHECK_THROWS(InvalidArgument, planner.all_to_all({two, two}, {})), "got 0 buffers");
  CHECK_CONTAINS(CHECK_THROWS(InvalidArgument, planner.all_gather(two, outputs)),
                 "on rank 1 gives itself 2 bytes but expects 3");
  CHECK_CONTAINS(CHECK_THROWS(InvalidArgument, planner.gather(two, outputs, 1)), "gives itself 2 bytes but expects 3");
  // On a rank that is not the root, these arguments do not count.
  planner.gather(two, {}, 0);
  planner.scatter({}, {data.data(), 2}, 0);
}

TEST(sizes_that_agree_balance_and_others_do_not) {
  constexpr size_t kRanks = 5;
  const auto balance_of = [](const std::vector<ExchangePlan>& plans) {
    uint64_t sum = 0;
    for (size_t r = 0; r < kRanks; ++r) sum += plans[r].balance(r);
    return sum;
  };
  std::vector<std::byte> data(100);
  const auto bytes = [](size_t from, size_t to) { return (from * 7 + to * 3) % 5; };  // some messages are empty
  std::vector<ExchangePlan> plans;
  size_t longest = 0;
  for (size_t r = 0; r < kRanks; ++r) {
    std::vector<ConstSpan> inputs;
    std::vector<Span> outputs;
    for (size_t other = 0; other < kRanks; ++other) {
      inputs.push_back({data.data(), bytes(r, other)});
      outputs.push_back({data.data(), bytes(other, r)});
    }
    plans.push_back(Planner{Op::AllToAll, static_cast<int>(r), kRanks}.all_to_all(inputs, outputs));
    longest = std::max(longest, plans[r].longest(r));
  }
  CHECK_EQ(balance_of(plans), uint64_t{0});
  CHECK_EQ(longest, size_t{4});
  for (size_t from = 0; from < kRanks; ++from) {
    for (size_t to = 0; to < kRanks; ++to) {
      std::vector<ExchangePlan> other = plans;
      ++other[from].sends[to]->bytes;
      CHECK_EQ(balance_of(other) == 0, from == to);
      ++other[from].sends[(to + 1) % kRanks]->bytes;
      CHECK(balance_of(other) != 0);
      ++other[to].receives[from]->bytes;
      CHECK_EQ(balance_of(other) == 0, from == (to + 1) % kRanks);
    }
  }
}

TEST(sizes_that_differ_are_told_from_the_tables) {
  const auto name = [](int r) { return "rank " + std::to_string(r); };
  const Sizes first = {7, 4, 7, 8};  // sends 4 to rank 1 and expects 8 of it; what it sends itself does not count
  Sizes second = {8, 0, 4, 1};
  CHECK_EQ(check_sizes({first.data(), second.data()}, name, CallRecord{}), size_t{8});
  second[0] = 9;
  CHECK_CONTAINS(CHECK_THROWS(MismatchError, check_sizes({first.data(), second.data()}, name, CallRecord{})),
                 "rank 1 sends 9 bytes to rank 0, which expects 8");
  const Sizes alone = {5, 5};
  CHECK_EQ(check_sizes({alone.data()}, name, CallRecord{}), size_t{0});
}

}  // namespace
}  // namespace ours::testing
