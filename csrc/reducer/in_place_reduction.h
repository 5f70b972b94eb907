#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <vector>

#include "reducer/averaging.h"
#include "reducer/gradient_memory.h"
#include "reducer/reducer_options.h"

namespace ours {

/// Decides whether the gradients of a backward are reduced where they lie, and provides the memory that autograd then
/// computes them in.
///
/// This needs a backward in which no code of the program can see a gradient change. Otherwise gradients are copied into
/// buckets.
class InPlaceReduction {
 public:
  InPlaceReduction(const std::vector<at::Tensor>& parameters, const ReducerOptions& options)
      : parameters_(parameters), options_(options) {}
  ~InPlaceReduction() { drop_memory(); }
  InPlaceReduction(const InPlaceReduction&) = delete;
  InPlaceReduction& operator=(const InPlaceReduction&) = delete;

  /// Gives autograd memory that the backend reduces without copies, for the next backward, if that is likely to be of
  /// use.
  void open_memory(const Averaging& averaging);
  /// Gives no more memory to autograd until the next open_memory().
  void close_memory();
  void drop_memory();

  /// Decides for the backward under way. `allowed`: the settings permit it. `unseen`: no code of the program runs in
  /// this backward.
  void decide(bool allowed, bool unseen);
  /// The last decision; at first false.
  bool is_active() const { return active_; }

 private:
  const std::vector<at::Tensor>& parameters_;
  const ReducerOptions& options_;
  bool active_ = false;
  /// Code of the program ran in the last backward that might have been reduced in place, and is likely to in the next.
  bool was_seen_ = false;
  std::shared_ptr<GradientMemory> memory_;
};

}  // namespace ours
