#pragma once

#include <cstddef>
#include <vector>

namespace ours {

/// Counts how often the gradient of each parameter arrives in one backward of a graph that never changes.
///
/// A parameter that is used several times may get several gradients, and only the last one completes it. The first
/// backward cannot know which one is the last, so it is recorded; later ones count down from the record.
class StaticGraph {
 public:
  explicit StaticGraph(size_t parameter_count) : expected_(parameter_count, 0) {}

  void enable() { enabled_ = true; }
  bool enabled() const { return enabled_; }
  bool recorded() const { return recorded_; }
  bool is_recording() const { return enabled_ && !recorded_; }

  void begin_backward();
  /// Notes an arrival in the backward that is recorded.
  void record(size_t index);
  /// Ends the record. Returns the parameters that got gradients, in the order in which these were completed.
  std::vector<size_t> end_recording();
  /// Returns the parameters that got no gradient in the recorded backward, ascending.
  std::vector<size_t> unused() const;
  void forget_record() { recorded_ = false; }

  /// How many more gradients the parameter is to get in this backward, by the record.
  size_t outstanding(size_t index) const { return outstanding_[index]; }
  /// Counts one of them as arrived. There must be one.
  void count_down(size_t index) { --outstanding_[index]; }

 private:
  bool enabled_ = false;
  bool recorded_ = false;
  std::vector<size_t> arrivals_;  ///< of the backward that is recorded, by parameter
  std::vector<size_t> expected_;
  std::vector<size_t> outstanding_;
};

}  // namespace ours
