#include "reducer/reducer_errors.h"

#include <torch/csrc/distributed/c10d/debug.h>

namespace ours {

std::string ReducerErrors::parameter(size_t index) const {
  return c10::str("parameter ", index, " (", options_.name_of(index), ")");
}

void ReducerErrors::unfinished_reduction(const std::vector<bool>& arrived, int rank, bool static_graph) {
  std::string text = "Expected to have finished reduction in the prior iteration before starting a new one. ";
  if (static_graph) {
    text +=
        "This error indicates that your training graph has changed in this iteration, e.g., one parameter is used in "
        "first iteration, but then got unused in the second iteration. this is not compatible with static_graph set "
        "to True.";
  } else {
    text += "This error indicates that some parameters got no gradient in the last backward. ";
    if (options_.find_unused_parameters) {
      text +=
          "Since `find_unused_parameters=True` is enabled, parameters outside the graph were accounted for, so likely "
          "not all `forward` function outputs participate in calculating loss, or the outputs are in a structure that "
          "is neither a tensor, tuple, list, dict nor dataclass.";
    } else {
      text +=
          "If they take part in some iterations only, turn on detection by passing the keyword argument "
          "`find_unused_parameters=True`; and make sure that all `forward` function outputs participate in calculating "
          "loss.";
    }
  }
  std::vector<size_t> missing;
  for (size_t index = 0; index < arrived.size(); ++index) {
    if (!arrived[index]) missing.push_back(index);
  }
  text += c10::str("\nParameter indices which did not receive grad for rank ", rank, ": ", c10::Join(" ", missing));
  if (!options_.parameter_names.empty()) {
    std::vector<std::string> names;
    for (const size_t index : missing) names.push_back(options_.name_of(index));
    text += c10::str("\nParameters which did not receive grad for rank ", rank, ": ", c10::Join(", ", names));
  }
  if (c10d::debug_level() == c10d::DebugLevel::Off) {
    text +=
        "\nTo have every collective checked as well, set the environment variable TORCH_DISTRIBUTED_DEBUG to either "
        "INFO or DETAIL.";
  }
  raise(text);
}

void ReducerErrors::marked_twice(size_t index, bool static_graph) {
  std::string text = c10::str(
      "Expected to mark a variable ready only once. Parameter at index ", index, " with name ", options_.name_of(index),
      " has been marked as ready twice in one backward. Either the parameter is shared by several backward "
      "passes of one step, as with reentrant checkpointing of a layer that runs more than once, or `forward` "
      "used it outside the wrapped module.");
  if (!static_graph) {
    text +=
        " Use checkpointing with use_reentrant=False, or pass static_graph=True if every iteration builds the same "
        "graph.";
  }
  raise(text);
}

void ReducerErrors::too_many_passes(size_t index, size_t passes) {
  raise(parameter(index), " got more gradients before step() than backward_passes_per_step=", passes,
        " allows. Call step() or synchronize() after that many backward passes, or raise backward_passes_per_step. If "
        "the parameter is shared by layers that are checkpointed, use checkpointing with use_reentrant=False.");
}

}  // namespace ours
