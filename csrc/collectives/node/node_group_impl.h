#pragma once

#include <string>
#include <vector>

#include "collectives/call_record.h"
#include "collectives/node/node_group.h"
#include "common/error.h"

// What the files that implement NodeGroup share.

namespace ours {

/// Sources of one reduction, without an allocation for usual numbers of ranks.
class Sources {
 public:
  explicit Sources(int ranks) : many_(ranks > kFewRanks ? static_cast<size_t>(ranks) : 0) {}
  const void** data() { return many_.empty() ? few_ : many_.data(); }

 private:
  static constexpr int kFewRanks = 16;

  const void* few_[kFewRanks] = {};
  std::vector<const void*> many_;
};

}  // namespace ours
