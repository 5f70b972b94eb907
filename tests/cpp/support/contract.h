#pragma once

#include "support/groups.h"

namespace ours::testing {

/// All kinds of groups, over host memory and over device memory.
const std::vector<GroupKind>& all_kinds();

}  // namespace ours::testing

/// A test that runs on every kind of group, `kind`.
#define CONTRACT(name)                                                         \
  void contract_##name(const ours::testing::GroupKind& kind);                  \
  TEST(name) {                                                                 \
    for (const auto& kind : ours::testing::all_kinds()) contract_##name(kind); \
  }                                                                            \
  void contract_##name(const ours::testing::GroupKind& kind)
