#include "transport/node/gate.h"

#include "support/testing.h"

namespace ours::testing {
namespace {

constexpr uint8_t kLeft = 1;
constexpr uint8_t kRight = 2;

void add(Shown& all, const Shown& one) { all.exchanged.balance += one.exchanged.balance; }

struct Visitor {
  Visitor(Gate& gate, uint32_t epoch, uint16_t rank, uint8_t side, uint64_t value) : pass(gate, epoch, rank, side) {
    all.exchanged.balance = value;
  }

  bool come() { return pass.come(&all, add); }
  bool finish() { return pass.finish(all, add); }
  uint64_t sum() const { return all.exchanged.balance; }

  GatePass pass;
  Shown all{};
};

void check_came(const Gate& gate, const Came& expected) { CHECK_EQ(gate.came.load(), expected.word()); }

TEST(who_comes_to_a_gate_second_goes_on_with_what_both_show) {
  Gate gate{};
  for (uint32_t epoch = 1; epoch < 6; epoch += 2) {
    // They come in turns, in either order.
    const bool left_first = epoch % 4 == 1;
    Visitor first(gate, epoch, 3, left_first ? kLeft : kRight, 10 * epoch);
    Visitor second(gate, epoch, 4, left_first ? kRight : kLeft, epoch);
    CHECK(!first.come());
    check_came(gate, {epoch, left_first ? kLeft : kRight, false, 3});
    CHECK(second.come());
    CHECK_EQ(second.sum(), uint64_t{11} * epoch);
    check_came(gate, {epoch, Came::kBoth, false, 4});
  }
}

// As if the first were stopped between the two steps in which it comes.
TEST(who_comes_while_the_other_writes_leaves_the_rest_to_it) {
  Gate gate{};
  gate.came = Came{1, kLeft, true, 3}.word();
  Visitor first(gate, 1, 3, kLeft, 5);
  Visitor second(gate, 1, 4, kRight, 7);
  CHECK(!second.come());
  CHECK_EQ(second.sum(), uint64_t{7});
  check_came(gate, {1, Came::kBoth, false, 3});
  gate.first = first.all;
  CHECK(first.finish());
  CHECK_EQ(first.sum(), uint64_t{12});
}

TEST(who_comes_to_a_gate_alone_goes_on) {
  Gate gate{};
  Visitor only(gate, 1, 3, Came::kBoth, 5);
  CHECK(only.come());
  CHECK_EQ(only.sum(), uint64_t{5});
  check_came(gate, {1, Came::kBoth, false, 3});
}

TEST(ranks_may_come_to_a_gate_and_show_nothing) {
  Gate gate{};
  CHECK(!GatePass(gate, 1, 3, kLeft).come(nullptr, nullptr));
  check_came(gate, {1, kLeft, false, 3});
  CHECK(GatePass(gate, 1, 4, kRight).come(nullptr, nullptr));
  check_came(gate, {1, Came::kBoth, false, 4});
}

}  // namespace
}  // namespace ours::testing
