#include "reducer/static_graph.h"

#include <algorithm>

namespace ours {

void StaticGraph::begin_backward() {
  if (!enabled_) return;
  // A backward that failed may have left a part of a record.
  if (!recorded_) arrivals_.clear();
  outstanding_ = expected_;
}

void StaticGraph::record(size_t index) { arrivals_.push_back(index); }

std::vector<size_t> StaticGraph::end_recording() {
  recorded_ = true;
  std::fill(expected_.begin(), expected_.end(), 0);
  std::vector<size_t> completed;
  for (auto index = arrivals_.rbegin(); index != arrivals_.rend(); ++index) {
    if (expected_[*index]++ == 0) completed.push_back(*index);
  }
  std::reverse(completed.begin(), completed.end());
  arrivals_.clear();
  return completed;
}

std::vector<size_t> StaticGraph::unused() const {
  std::vector<size_t> unused;
  for (size_t index = 0; index < expected_.size(); ++index) {
    if (expected_[index] == 0) unused.push_back(index);
  }
  return unused;
}

}  // namespace ours
