#include "collectives/op.h"

#include <set>
#include <string>

#include "support/testing.h"

namespace ours {
namespace {

TEST(op_names_are_distinct) {
  std::set<std::string> names;
  for (int i = 0; i <= static_cast<int>(Op::RecvAnySource); ++i) {
    CHECK(names.insert(name_of(static_cast<Op>(i))).second);
  }
  CHECK_EQ(std::string(name_of(Op::AllReduce)), "all_reduce");
  CHECK_EQ(std::string(name_of(static_cast<Op>(200))), "unknown operation");
}

}  // namespace
}  // namespace ours
