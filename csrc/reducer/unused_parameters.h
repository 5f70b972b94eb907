#pragma once

#include <ATen/core/Tensor.h>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

#include "reducer/autograd_hooks.h"

// Which parameters took part: here, by a walk through the graph, and anywhere, by a reduced map.

namespace ours {

/// Returns the indices, ascending, of those `accumulators` that no output reaches.
std::vector<size_t> find_unreached(const std::vector<NodePtr>& accumulators, const std::vector<at::Tensor>& outputs);

/// A map of the parameters that received a gradient since the last reduction. Steps without a reduction add to it, so
/// after them a parameter counts as used if any of the accumulated steps used it.
class UsedMap {
 public:
  UsedMap(size_t parameter_count, at::Device device);

  void mark_used(size_t index) { used_[index] = 1; }
  /// Whether this rank used the parameter, or some rank did, as far as is known here.
  bool known_used(size_t index) const { return used_[index] != 0; }
  /// Starts to add up the maps of all ranks.
  void start_reduction(c10d::ProcessGroup& group);
  /// Whether any rank used the parameter. Waits for the reduction, and on an accelerator for the device, only if this
  /// rank did not.
  bool used_anywhere(size_t index);
  /// Waits for a reduction in flight, as Work::wait() does, and forgets what was used; with `keep` it remembers what
  /// any rank used instead.
  void finish(bool keep);
  /// Forgets everything, a reduction in flight included.
  void reset();
  /// A map that says that nothing was used, for a rank that has run out of input: int32, one element a parameter.
  at::Tensor unused_map() const;
  /// How many ranks used each parameter by the last reduction: int32, one element a parameter.
  at::Tensor last_reduced() const { return reduced_.defined() ? reduced_ : unused_map(); }

 private:
  void await_reduction();
  void read_reduced();

  at::Device device_;
  std::vector<int32_t> used_;
  at::Tensor reduced_;
  c10::intrusive_ptr<c10d::Work> work_;
  bool unread_ = false;  ///< the reduction has ended, and used_ is still this rank's
};

}  // namespace ours
