#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

#include "reducer/bucket.h"
#include "reducer/reducer_errors.h"
#include "reducer/reducer_options.h"

namespace ours {

/// Finds NaN and infinite values in gradients, and which rank they come from.
///
/// A reduction spreads them to all ranks, and may overwrite the gradients. So each rank looks at its own ones before
/// they are reduced, and at the averages afterwards, since a hook or a half type may make infinite values of finite
/// ones. At the end of backward the ranks add up what they have found, in an all-reduce of two numbers, and all come to
/// the same answer, whatever a hook has made of the values. Only if something was found do they tell each other where.
class BadGradients {
 public:
  /// Unless the options say what to do about such values, nothing is looked at, and nothing is communicated. The
  /// arguments must outlive this.
  BadGradients(const std::vector<at::Tensor>& parameters, const ReducerOptions& options, ReducerErrors& errors)
      : options_(options), errors_(errors), device_(parameters.front().device()), own_(parameters.size(), 0) {}

  /// Looks at this rank's gradients in a bucket that is complete and has not been reduced.
  void look_at_gradients(const Bucket& bucket);
  /// Looks at the averages of a bucket that has been reduced; by a hook, if there is one.
  void look_at_averages(const Bucket& bucket, bool by_hook);
  /// Ends the backward of that number: if any rank has found something, warns or throws RuntimeError. Returns whether
  /// the gradients have to be dropped. Collective.
  bool react(c10d::ProcessGroup& group, int64_t backward);
  /// Forgets what has been found.
  void forget();

 private:
  struct Look {
    size_t index;
    at::Tensor bad;  ///< on the device: whether there are such values
  };

  bool enabled() const { return !options_.bad_gradients.empty(); }
  void settle_looks();
  bool is_own() const;
  std::string agree(c10d::ProcessGroup& group) const;
  std::string describe(c10d::ProcessGroup& group) const;

  const ReducerOptions& options_;
  ReducerErrors& errors_;
  const at::Device device_;
  std::vector<uint8_t> own_;  ///< by parameter: whether this rank's gradient is bad
  bool averages_ = false;     ///< whether an average is
  // An accelerator is asked once in a backward, so that the host need not wait for it earlier.
  std::vector<Look> gradient_looks_;
  std::vector<at::Tensor> average_looks_;
};

}  // namespace ours
