#include "reducer/overlap.h"

#include <algorithm>
#include <string>
#include <utility>

#include "common/error.h"

namespace ours {

std::vector<int64_t> exposed_times(int64_t compute_ended, const std::vector<int64_t>& launched,
                                   const std::vector<int64_t>& ended) {
  if (launched.size() != ended.size()) {
    throw InvalidArgument("exposed_times: " + std::to_string(launched.size()) + " launches, but " +
                          std::to_string(ended.size()) + " ends");
  }
  std::vector<int64_t> exposed;
  int64_t accounted = compute_ended;
  for (size_t i = 0; i < ended.size(); ++i) {
    const int64_t from = std::max(accounted, launched[i]);
    exposed.push_back(ended[i] < 0 ? 0 : std::max<int64_t>(0, ended[i] - from));
    accounted = std::max(accounted, ended[i]);
  }
  return exposed;
}

int64_t busy_time(const std::vector<int64_t>& began, const std::vector<int64_t>& ended) {
  if (began.size() != ended.size()) {
    throw InvalidArgument("busy_time: " + std::to_string(began.size()) + " beginnings, but " +
                          std::to_string(ended.size()) + " ends");
  }
  std::vector<std::pair<int64_t, int64_t>> intervals;
  for (size_t i = 0; i < began.size(); ++i) {
    if (ended[i] >= 0) intervals.emplace_back(began[i], ended[i]);
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

int64_t busy_time(const BackwardTimes& times) {
  std::vector<int64_t> began;
  std::vector<int64_t> ended;
  for (const BucketTimes& bucket : times.buckets) {
    began.push_back(bucket.reduction_began);
    ended.push_back(bucket.reduction_ended);
  }
  return busy_time(began, ended);
}

std::vector<int64_t> exposed_times(const BackwardTimes& times) {
  std::vector<int64_t> launched;
  std::vector<int64_t> ended;
  for (const BucketTimes& bucket : times.buckets) {
    launched.push_back(bucket.launched);
    ended.push_back(bucket.reduction_ended);
  }
  return exposed_times(times.compute_ended, launched, ended);
}

}  // namespace ours
