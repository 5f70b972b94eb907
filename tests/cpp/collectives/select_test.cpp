#include "collectives/select.h"

#include <cstdio>
#include <fstream>

#include "common/error.h"
#include "support/testing.h"

namespace ours::testing {
namespace {

constexpr size_t kSmall = 64 * 1024;

std::vector<size_t> sizes() {
  std::vector<size_t> all = {0, SIZE_MAX};
  for (size_t bytes = 1; bytes <= size_t{1} << 30; bytes *= 2) {
    for (const size_t size : {bytes - 1, bytes, bytes + 1}) all.push_back(size);
  }
  for (size_t others = 1; others <= 40; ++others) {
    for (const size_t size : {kSmall / others - 1, kSmall / others, kSmall / others + 1}) all.push_back(size);
  }
  return all;
}

TEST(without_rules_ranks_with_nodes_of_their_own_choose_by_number_and_size) {
  const Selection table = Selection::parse("");
  for (int ranks = 1; ranks <= 200; ++ranks) {
    for (const size_t bytes : sizes()) {
      const bool few = ranks <= 16;
      const size_t others = static_cast<size_t>(std::max(ranks - 1, 1));
      const Algorithm expected = few ? (bytes <= kSmall / others ? Algorithm::Whole : Algorithm::Direct)
                                     : (bytes <= kSmall ? Algorithm::Doubling : Algorithm::Ring);
      for (const Selectable operation : {Selectable::AllReduce, Selectable::Reduce}) {
        CHECK(table.choose({operation, ranks, 1, bytes}) == expected);
      }
      for (const Selectable operation : {Selectable::ReduceScatter, Selectable::AllGather}) {
        CHECK(table.choose({operation, ranks, 1, bytes}) == (few ? Algorithm::Direct : Algorithm::Ring));
      }
    }
  }
}

TEST(without_rules_nodes_of_several_ranks_choose_by_number_and_size) {
  const Selection table = Selection::parse("");
  for (int nodes = 1; nodes <= 600; ++nodes) {
    for (const int local : {2, 8, 100}) {
      for (const size_t bytes : sizes()) {
        const size_t others = static_cast<size_t>(std::max(nodes - 1, 1));
        Algorithm expected = bytes <= kSmall / others ? Algorithm::Whole : Algorithm::Direct;
        if (nodes >= 450) expected = bytes <= size_t{2} << 20 ? Algorithm::Doubling : Algorithm::Ring;
        const size_t most = nodes >= 300 ? 128 : nodes >= 96 ? 64 : nodes >= 32 ? 16 : 0;
        if (most != 0 && bytes <= most * 1024) expected = Algorithm::Doubling;
        CHECK(table.choose({Selectable::AllReduce, nodes, local, bytes}) == expected);
      }
    }
  }
}

TEST(the_first_rule_that_applies_decides) {
  const Selection table = Selection::parse(
      "# of mine\n"
      "all_reduce nodes>=4 nodes<=8 local=2 bytes<=1K doubling  # between four and eight\r\n"
      "\n"
      "all_reduce nodes=5 ring; reduce whole\n"
      "all bytes>=1M doubling\n"
      "all_gather nodes>=2 ring");
  const auto chosen = [&](Selectable operation, int nodes, int local, size_t bytes) {
    return std::string(name_of(table.choose({operation, nodes, local, bytes})));
  };
  CHECK_EQ(chosen(Selectable::AllReduce, 4, 2, 1024), std::string("doubling"));
  CHECK_EQ(chosen(Selectable::AllReduce, 8, 2, 0), std::string("doubling"));
  CHECK_EQ(chosen(Selectable::AllReduce, 9, 2, 100), std::string("whole"));
  CHECK_EQ(chosen(Selectable::AllReduce, 4, 1, 1024), std::string("whole"));
  CHECK_EQ(chosen(Selectable::AllReduce, 5, 2, 1024), std::string("doubling"));
  CHECK_EQ(chosen(Selectable::AllReduce, 5, 2, 1025), std::string("ring"));
  CHECK_EQ(chosen(Selectable::Reduce, 5, 2, 1 << 30), std::string("whole"));
  CHECK_EQ(chosen(Selectable::AllReduce, 3, 2, 1 << 20), std::string("doubling"));
  // reduce_scatter has no doubling, so that rule does not apply to it.
  CHECK_EQ(chosen(Selectable::ReduceScatter, 3, 1, 1 << 20), std::string("direct"));
  CHECK_EQ(chosen(Selectable::AllGather, 3, 1, 1 << 20), std::string("ring"));
}

TEST(in_a_node_the_choice_is_by_size_and_by_rules_of_its_own) {
  const Selection table = Selection::parse("");
  for (const int local : {1, 2, 3, 8}) {
    const size_t limit = size_t{256} * 1024 / static_cast<size_t>(local);
    CHECK(table.choose({Selectable::NodeReduce, 1, local, limit}) == Algorithm::Whole);
    CHECK(table.choose({Selectable::NodeReduce, 1, local, limit + 1}) == Algorithm::Direct);
  }
  // `all` means all operations that go between nodes.
  CHECK(Selection::parse("all direct").choose({Selectable::NodeReduce, 1, 2, 4}) == Algorithm::Whole);
  CHECK(Selection::parse("node_reduce direct").choose({Selectable::NodeReduce, 1, 2, 4}) == Algorithm::Direct);
  CHECK_CONTAINS(CHECK_THROWS(InvalidArgument, Selection::parse("node_reduce ring")), "whole and direct only");
}

TEST(the_choice_by_size_is_that_of_the_table) {
  for (const char* rules : {"", "node_reduce bytes>=100 bytes<=1K direct;all_reduce sent>=3K sent<=1M ring",
                            "all bytes<=0 doubling;reduce read>=7 whole;node_reduce read>=1000 direct"}) {
    const Selection table = Selection::parse(rules);
    for (const Selectable operation : {Selectable::AllReduce, Selectable::Reduce, Selectable::NodeReduce}) {
      for (const int nodes : {1, 2, 7, 300}) {
        for (const int local : {1, 2, 7}) {
          const Selection::BySize by_size = table.by_size(operation, nodes, local);
          for (const size_t bytes : sizes()) {
            CHECK(by_size.choose(bytes) == table.choose({operation, nodes, local, bytes}));
          }
        }
      }
    }
  }
}

TEST(tables_survive_their_way_through_the_store_and_a_file) {
  const std::string rules = "all_reduce nodes>=4 bytes<=1536 doubling;reduce local=2 sent>=1K sent<=3M ring";
  CHECK_EQ(Selection::parse(rules).rules(), rules);
  CHECK_EQ(Selection::parse("  all   nodes>=2 nodes<=9 bytes>=1048576 ring ; ").rules(),
           std::string("all nodes>=2 nodes<=9 bytes>=1M ring"));
  const Selection table = Selection::parse(rules + " # why not");
  CHECK_CONTAINS(table.table(), "sent<=3M ring");
  CHECK_CONTAINS(table.table(), "# why not");
  CHECK_CONTAINS(table.table(), "all direct");
  const Selection again = Selection::parse(table.table());
  for (int nodes = 1; nodes < 40; ++nodes) {
    for (const size_t bytes : sizes()) {
      const SelectionCase call{Selectable::Reduce, nodes, 2, bytes};
      CHECK(table.choose(call) == again.choose(call));
    }
  }
  const std::string path = "./select_test.tmp";
  std::ofstream(path) << "# by hand\n" << rules << "\n";
  CHECK_EQ(selection_from(path).rules(), rules);
  CHECK_EQ(selection_from(rules).rules(), rules);
  CHECK_EQ(selection_from("").rules(), std::string());
  std::ofstream(path) << "all ring\nall rings\n";
  const std::string error = CHECK_THROWS(InvalidArgument, selection_from(path));
  CHECK_CONTAINS(error, path);
  CHECK_CONTAINS(error, "line 2");
  std::ofstream(path) << std::string(1 << 17, '#');
  CHECK_CONTAINS(CHECK_THROWS(InvalidArgument, selection_from(path)), "64 KiB");
  std::remove(path.c_str());
  CHECK_CONTAINS(CHECK_THROWS(InvalidArgument, selection_from(path)), "No such file");
  CHECK_CONTAINS(CHECK_THROWS(InvalidArgument, selection_from("/proc")), "cannot read");
  CHECK_CONTAINS(CHECK_THROWS(InvalidArgument, selection_from("table.txt")), "must have a slash");
}

TEST(what_is_no_rule_is_refused_with_what_is_accepted) {
  const std::pair<const char*, const char*> bad[] = {
      {"all", "the algorithm is missing"},
      {"ring", "'ring' is no operation"},
      {"broadcast ring", "'broadcast' is no operation"},
      {"All ring", "'All' is no operation"},
      {"all rings", "'rings' is neither"},
      {"all ring nodes>=2", "'ring' is neither"},
      {"all nodes>=2", "missing"},
      {"all nodes>2 ring", "'nodes>2' is neither"},
      {"all nodes ring", "'nodes' is neither"},
      {"all nodes>= ring", "'nodes>=' is neither"},
      {"all nodes== ring", "'nodes==' is neither"},
      {"all nodes=>2 ring", "'nodes=>2' is neither"},
      {"all nodes>=-2 ring", "'nodes>=-2' is neither"},
      {"all nodes>= 2 ring", "'nodes>=' is neither"},
      {"all ranks>=2 ring", "'ranks>=2' is neither"},
      {"all bytes<=64k ring", "'bytes<=64k' is neither"},
      {"all bytes<=K ring", "'bytes<=K' is neither"},
      {"all bytes<=1.5M ring", "'bytes<=1.5M' is neither"},
      {"all bytes<=99999999999999G ring", "is neither"},
      {"all bytes<=1K bytes>=2K ring", "no call can meet"},
      {"reduce_scatter doubling", "direct and ring only"},
      {"all_gather bytes<=1K ring", "by nodes and local"},
  };
  for (const auto& [text, words] : bad) {
    const std::string error = CHECK_THROWS(InvalidArgument, Selection::parse("all ring\n" + std::string(text)));
    CHECK_CONTAINS(error, "line 2 of the table");
    CHECK_CONTAINS(error, words);
    CHECK_CONTAINS(error, "whole, doubling, direct, ring");
  }
  // Whitespace of any kind between rules is no rule.
  CHECK_EQ(Selection::parse("\v;\f\nall ring;\v").rules(), std::string("all ring"));
  std::string many;
  for (int i = 0; i < 400; ++i) many += "all ring\n";
  CHECK_EQ(Selection::parse(many).rules().size(), size_t{400 * 9 - 1});
  CHECK_CONTAINS(CHECK_THROWS(InvalidArgument, Selection::parse(many + many)), "accepted: 4096");
  CHECK_CONTAINS(CHECK_THROWS(InvalidArgument, selectable_of("barrier")), "all_reduce, reduce");
}

}  // namespace
}  // namespace ours::testing
