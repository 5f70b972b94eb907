#pragma once

#include <c10/util/Exception.h>

#include <algorithm>
#include <cstddef>
#include <vector>

#include "reducer/reducer_errors.h"

namespace ours {

/// Counts the gradients of each parameter where a fixed number of backwards is reduced as one, and nothing says when a
/// backward begins.
///
/// Counts are by parameter, since a backward may leave out parameters, and one within another, as in reentrant
/// checkpointing, brings gradients of its own.
class PassCount {
 public:
  explicit PassCount(size_t parameter_count) : counts_(parameter_count, 0) {}

  /// 0, as at first: nothing is counted. Throws RuntimeError in the middle of a step.
  void set_passes(size_t passes) {
    TORCH_CHECK(!begun(),
                "The number of backward passes in a step cannot be changed between backward and the end of the step. "
                "Change it after step() or synchronize().");
    passes_ = passes;
  }
  bool enabled() const { return passes_ > 0; }

  void start_anew() { std::fill(counts_.begin(), counts_.end(), 0); }
  /// Whether any gradient has been counted.
  bool begun() const {
    return std::any_of(counts_.begin(), counts_.end(), [](size_t count) { return count > 0; });
  }
  /// Counts a gradient. Returns whether it is the parameter's last one, and raises an error if that has come before.
  bool is_last(size_t index, ReducerErrors& errors) {
    if (!enabled()) return true;
    if (counts_[index] == passes_) errors.too_many_passes(index, passes_);
    return ++counts_[index] == passes_;
  }

 private:
  size_t passes_ = 0;
  std::vector<size_t> counts_;
};

}  // namespace ours
