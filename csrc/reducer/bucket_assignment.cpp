#include "reducer/bucket_assignment.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <string>
#include <tuple>

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

void sort_by_lowest_index(BucketAssignment& assignment) {
  std::vector<size_t> lowest(assignment.buckets.size());
  for (size_t i = 0; i < lowest.size(); ++i) {
    lowest[i] = *std::min_element(assignment.buckets[i].begin(), assignment.buckets[i].end());
  }
  std::vector<size_t> rank(lowest.size());
  std::iota(rank.begin(), rank.end(), size_t{0});
  std::sort(rank.begin(), rank.end(), [&](size_t a, size_t b) { return lowest[a] < lowest[b]; });
  BucketAssignment sorted;
  for (const size_t i : rank) {
    sorted.buckets.push_back(std::move(assignment.buckets[i]));
    sorted.caps.push_back(assignment.caps[i]);
  }
  assignment = std::move(sorted);
}

}  // namespace

BucketAssignment assign_buckets(const std::vector<GradientInfo>& gradients, const std::vector<int64_t>& caps,
                                const std::vector<size_t>& order) {
  if (caps.empty()) throw InvalidArgument("bucket assignment needs at least one bucket size");
  if (!order.empty()) check_permutation(order, gradients.size());

  BucketAssignment result;
  std::map<Key, OpenBucket> open;
  const auto close = [&](OpenBucket& bucket) {
    result.buckets.push_back(std::move(bucket.indices));
    result.caps.push_back(caps[bucket.next_cap]);
    bucket.indices.clear();
    bucket.bytes = 0;
    bucket.next_cap = std::min(bucket.next_cap + 1, caps.size() - 1);
  };

  for (size_t position = 0; position < gradients.size(); ++position) {
    const size_t index = order.empty() ? position : order[position];
    const GradientInfo& gradient = gradients[index];
    if (gradient.sparse) {
      result.buckets.push_back({index});
      result.caps.push_back(0);
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

  if (order.empty()) sort_by_lowest_index(result);
  return result;
}

std::vector<int64_t> encode_buckets(const std::vector<std::vector<size_t>>& buckets, size_t gradient_count) {
  std::vector<int64_t> code(1 + 2 * gradient_count, 0);
  code[0] = static_cast<int64_t>(buckets.size());
  size_t next = 1 + gradient_count;
  for (size_t i = 0; i < buckets.size(); ++i) {
    code[1 + i] = static_cast<int64_t>(buckets[i].size());
    for (const size_t index : buckets[i]) code[next++] = static_cast<int64_t>(index);
  }
  return code;
}

std::vector<std::vector<size_t>> decode_buckets(const std::vector<int64_t>& code, size_t gradient_count) {
  const auto count = static_cast<int64_t>(gradient_count);
  if (code.size() != 1 + 2 * gradient_count || code[0] < 0 || code[0] > count) {
    throw InvalidArgument("the bucket order received does not fit a model of " + std::to_string(count) + " parameters");
  }
  std::vector<std::vector<size_t>> buckets(static_cast<size_t>(code[0]));
  std::vector<size_t> order;
  size_t next = 1 + gradient_count;
  for (size_t i = 0; i < buckets.size(); ++i) {
    for (int64_t left = code[1 + i]; left > 0 && next < code.size(); --left) {
      buckets[i].push_back(static_cast<size_t>(code[next++]));
    }
    order.insert(order.end(), buckets[i].begin(), buckets[i].end());
  }
  check_permutation(order, gradient_count);
  return buckets;
}

}  // namespace ours
