#include "reducer/overlap.h"

#include <algorithm>
#include <utility>

namespace ours {

std::vector<int64_t> exposed_times(const BackwardTimes& times) {
  std::vector<int64_t> exposed;
  int64_t accounted = times.compute_ended;
  for (const BucketTimes& bucket : times.buckets) {
    const int64_t from = std::max(accounted, bucket.launched);
    exposed.push_back(bucket.reduction_ended < 0 ? 0 : std::max<int64_t>(0, bucket.reduction_ended - from));
    accounted = std::max(accounted, bucket.reduction_ended);
  }
  return exposed;
}

int64_t busy_time(const BackwardTimes& times) {
  std::vector<std::pair<int64_t, int64_t>> intervals;
  for (const BucketTimes& bucket : times.buckets) {
    if (bucket.reduction_ended >= 0) intervals.emplace_back(bucket.reduction_began, bucket.reduction_ended);
  }
  std::sort(intervals.begin(), intervals.end());
  int64_t busy = 0;
  int64_t counted = 0;
  for (const auto& [from, to] : intervals) {
    busy += std::max<int64_t>(0, to - std::max(from, counted));
    counted = std::max(counted, to);
  }
  return busy;
}

}  // namespace ours
