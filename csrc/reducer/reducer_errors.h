#pragma once

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

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

  /// `arrived` tells of each parameter whether it got a gradient on `rank`.
  [[noreturn]] void unfinished_reduction(const std::vector<bool>& arrived, int rank, bool static_graph);
  [[noreturn]] void marked_twice(size_t index, bool static_graph);
  [[noreturn]] void too_many_passes(size_t index, size_t passes);
  /// Any other error; the text is put together from the arguments.
  template <typename... Parts>
  [[noreturn]] void raise(const Parts&... parts) {
    last_ = c10::str(parts...);
    TORCH_CHECK(false, last_);
  }
  /// "parameter 3 (layer.weight)"
  std::string parameter(size_t index) const;

 private:
  const ReducerOptions& options_;
  std::string last_;
};

}  // namespace ours
