#pragma once

#include <cstring>
#include <string>
#include <vector>

#include "collectives/node_group.h"
#include "common/error.h"

// What the files that implement NodeGroup share.

namespace ours {

CallRecord record_of(const Call& call);
CallRecord record_of(const Call& call, size_t count, const Reduction& reduction, int root);
bool same_record(const CallRecord& a, const CallRecord& b);

/// "all_reduce number 7 (SUM, 1024 x float32)"
std::string describe_record(const CallRecord& record);

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

/// Copies what leaves the cache before anyone reads it: around the cache, unless it is so short that the fence after
/// that would cost more.
inline void* copy_away(void* to, const void* from, size_t bytes) {
  constexpr size_t kLeastBytes = 4096;
  if (bytes < kLeastBytes) return std::memcpy(to, from, bytes);
  copy_stream(to, from, bytes);
  return to;
}

template <class Body>
void NodeGroup::guarded(Body&& body) {
  session_->failure().check();
  try {
    body();
  } catch (...) {
    session_->failure().fail(std::current_exception());
    throw;
  }
}

}  // namespace ours
