#pragma once

#include <cstddef>
#include <vector>

namespace ours {

/// Pointers to the sources of one reduction; needs no allocation for usual numbers of ranks.
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
