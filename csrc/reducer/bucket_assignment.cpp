#include "reducer/bucket_assignment.h"

#include <algorithm>
#include <map>
#include <string>
#include <tuple>
#include <utility>

#include "common/error.h"

namespace ours {
namespace {

using Key = std::tuple<int, int, int>;

/// The bucket that is being filled for one dtype and device.
struct OpenBucket {
  std::vector<size_t> indices;
  int64_t bytes = 0;
  size_t next_cap = 0;
  size_t opened_at = 0;
};

}  // namespace

void check_permutation(const std::vector<size_t>& order, size_t count) {
  std::vector<bool> seen(count, false);
  for (const size_t index : order) {
    if (index >= count || seen[index]) {
      throw InvalidArgument("bucket order: gradient " + std::to_string(index) + " of " + std::to_string(count) +
                            (index >= count ? " does not exist" : " occurs twice"));
    }
    seen[index] = true;
  }
  if (order.size() != count) {
    throw InvalidArgument("bucket order: " + std::to_string(order.size()) + " gradients given, " +
                          std::to_string(count) + " expected");
  }
}

Buckets assign_buckets(const std::vector<GradientInfo>& gradients, const std::vector<int64_t>& caps,
                       const std::vector<size_t>& order) {
  if (caps.empty()) throw InvalidArgument("bucket assignment needs at least one bucket size");
  if (!order.empty()) check_permutation(order, gradients.size());

  Buckets buckets;
  std::map<Key, OpenBucket> open;
  const auto close = [&](OpenBucket& bucket) {
    buckets.push_back(std::exchange(bucket.indices, {}));
    bucket.bytes = 0;
    bucket.next_cap = std::min(bucket.next_cap + 1, caps.size() - 1);
  };

  for (size_t position = 0; position < gradients.size(); ++position) {
    const size_t index = order.empty() ? position : order[position];
    const GradientInfo& gradient = gradients[index];
    if (gradient.sparse) {
      buckets.push_back({index});
      continue;
    }
    OpenBucket& bucket = open[Key{gradient.dtype, gradient.device_type, gradient.device_index}];
    if (bucket.indices.empty()) bucket.opened_at = position;
    bucket.indices.push_back(index);
    bucket.bytes += gradient.bytes;
    if (bucket.bytes >= caps[bucket.next_cap]) close(bucket);
  }

  std::vector<OpenBucket*> rest;
  for (auto& entry : open) {
    if (!entry.second.indices.empty()) rest.push_back(&entry.second);
  }
  std::sort(rest.begin(), rest.end(), [](auto* a, auto* b) { return a->opened_at < b->opened_at; });
  for (OpenBucket* bucket : rest) close(*bucket);

  // Each bucket begins with its lowest index then.
  if (order.empty()) std::sort(buckets.begin(), buckets.end(), [](auto& a, auto& b) { return a.front() < b.front(); });
  return buckets;
}

}  // namespace ours
