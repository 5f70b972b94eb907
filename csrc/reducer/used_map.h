#pragma once

#include <ATen/core/Tensor.h>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

namespace ours {

/// A map of the parameters that received a gradient since the last reduction, first on this rank and, after the
/// reduction, on any rank.
///
/// Steps without a reduction add to it, so after them a parameter counts as used if any of those steps used it. A map
/// that is not tracked takes every parameter as used.
class UsedMap {
 public:
  UsedMap(size_t parameter_count, at::Device device, bool tracked);

  void track() { tracked_ = true; }
  bool tracked() const { return tracked_; }
  void mark_used(size_t index) { used_[index] = 1; }
  /// Whether possibly no rank used the parameter: neither this one nor, as far as is known here, another one has used
  /// it.
  bool may_be_unused(size_t index) const { return tracked_ && used_[index] == 0; }
  /// Whether no rank used the parameter. Waits for the reduction, and on an accelerator for the device, only if this
  /// rank did not use it.
  bool unused_everywhere(size_t index);

  /// Starts to add up the maps of all ranks.
  void start_reduction(c10d::ProcessGroup& group);
  /// Waits for a reduction in flight, like Work::wait(), and forgets what was used; with `keep` it remembers what any
  /// rank used instead.
  void finish(bool keep);
  /// Forgets everything, a reduction in flight included.
  void reset();
  /// A map in which nothing was used, for a rank that has run out of input: int32, one element for each parameter.
  at::Tensor unused_map() const;
  /// How many ranks used each parameter by the last reduction: int32, one element for each parameter.
  at::Tensor last_reduced() const { return reduced_.defined() ? reduced_ : unused_map(); }

 private:
  void await_reduction();
  void read_reduced();

  const at::Device device_;
  bool tracked_;
  std::vector<int32_t> used_;
  at::Tensor reduced_;
  c10::intrusive_ptr<c10d::Work> work_;
  bool unread_ = false;  ///< the reduction has ended, and used_ is still this rank's
};

}  // namespace ours
