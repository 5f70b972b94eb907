#include "support/contract.h"

#include "support/device_ranks.h"

namespace ours::testing {

const std::vector<GroupKind>& all_kinds() {
  static const std::vector<GroupKind> kKinds = [] {
    std::vector<GroupKind> all = group_kinds();
    all.insert(all.end(), device_kinds().begin(), device_kinds().end());
    return all;
  }();
  return kKinds;
}

}  // namespace ours::testing
