#pragma once

#include <string>
#include <vector>

#include "reducer/reducer_options.h"

namespace ours {

/// Raises the errors of a Reducer as RuntimeErrors, and keeps the text of the last one.
///
/// Training scripts and PyTorch's own tests look for some of the phrases, so those are kept word for word.
class ReducerErrors {
 public:
  explicit ReducerErrors(const ReducerOptions& options) : options_(options) {}

  /// The text of the last error; empty if there was none.
  const std::string& last() const { return last_; }

  /// `missing` are the parameters that got no gradient on `rank`.
  [[noreturn]] void unfinished_reduction(const std::vector<size_t>& missing, int rank, bool static_graph);
  [[noreturn]] void marked_twice(size_t index, bool static_graph);
  [[noreturn]] void changed_static_graph(size_t index);
  [[noreturn]] void late_static_graph();
  /// The gradient cannot go into its bucket; `misfit` says why.
  [[noreturn]] void misfit(size_t index, const std::string& misfit);
  /// The gradient was expected to be sparse.
  [[noreturn]] void dense_gradient(size_t index);
  /// The gradient was written to while it was being reduced where it lies.
  [[noreturn]] void changed_during_reduction(size_t index);
  /// The gradient was expected to be a view of its bucket.
  [[noreturn]] void replaced_view(size_t index);
  /// Only `arrived` of `expected` gradients are in the order by which buckets are to be rebuilt.
  [[noreturn]] void incomplete_order(size_t arrived, size_t expected);

 private:
  [[noreturn]] void raise(std::string text);
  /// "parameter 3 (layer.weight)"
  std::string parameter(size_t index) const;

  const ReducerOptions& options_;
  std::string last_;
};

}  // namespace ours
