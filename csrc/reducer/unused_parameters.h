#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <optional>
#include <vector>

#include "reducer/autograd_hooks.h"

namespace ours {

/// The indices of the parameters that the current backward does not reach on this rank, ascending.
class UnusedParameters {
 public:
  /// Finds the parameters whose accumulator no output reaches, by a walk through the graph. `accumulators` run
  /// parallel to the parameters.
  void search(const std::vector<NodePtr>& accumulators, const std::vector<at::Tensor>& outputs);
  void set(std::vector<size_t> indices) { indices_ = std::move(indices); }
  const std::vector<size_t>& indices() const { return indices_; }
  bool contains(size_t index) const { return std::binary_search(indices_.begin(), indices_.end(), index); }
  /// Whether all searches so far had the same result.
  bool never_changed() const { return never_changed_; }

 private:
  std::vector<size_t> indices_;
  std::optional<std::vector<size_t>> first_;  ///< the result of the first search
  bool never_changed_ = true;
};

}  // namespace ours
