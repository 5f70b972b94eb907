#pragma once

#include <string>
#include <vector>

// The texts of the reducer's errors. Training scripts and PyTorch's own tests look for some of the phrases, so those
// are kept word for word.

namespace ours {

struct UnfinishedReduction {
  int rank = 0;
  bool static_graph = false;
  bool find_unused_parameters = false;
  /// The parameters that got no gradient: indices, and names where known.
  std::vector<size_t> missing;
  std::vector<std::string> names;
};

std::string describe_unfinished_reduction(const UnfinishedReduction& state);
std::string describe_marked_twice(size_t index, const std::string& name, bool static_graph);
std::string describe_changed_graph(size_t index, const std::string& name);

}  // namespace ours
