#include "reducer/reducer_errors.h"

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>
#include <torch/csrc/distributed/c10d/debug.h>

#include <utility>

namespace ours {

void ReducerErrors::raise(std::string text) {
  last_ = std::move(text);
  TORCH_CHECK(false, last_);
}

std::string ReducerErrors::parameter(size_t index) const {
  return c10::str("parameter ", index, " (", options_.name_of(index), ")");
}

void ReducerErrors::unfinished_reduction(const std::vector<size_t>& missing, int rank, bool static_graph) {
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
  raise(std::move(text));
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
  raise(std::move(text));
}

void ReducerErrors::changed_static_graph(size_t index) {
  raise(c10::str("Your training graph has changed in this iteration: ", parameter(index),
                 " received more gradients than in the first iteration, e.g., it was unused then. This is not "
                 "compatible with static_graph set to True; construct the module without it."));
}

void ReducerErrors::late_static_graph() {
  raise("set_static_graph() should be called before training loop starts and after DDP is constructed.");
}

void ReducerErrors::misfit(size_t index, const std::string& misfit) {
  raise(c10::str("The gradient of ", parameter(index), " cannot be reduced: ", misfit, "."));
}

void ReducerErrors::dense_gradient(size_t index) {
  raise(c10::str("Expected variable to have sparse gradient: ", parameter(index),
                 " got a dense one. Construct its module with sparse=False."));
}

void ReducerErrors::changed_during_reduction(size_t index) {
  raise(c10::str("The gradient of ", parameter(index),
                 " was changed during backward, while it was being averaged. Change gradients after backward, or set "
                 "OURS_REDUCE_IN_PLACE=0."));
}

void ReducerErrors::replaced_view(size_t index) {
  raise(
      c10::str("Detected at least one parameter gradient is not the expected DDP bucket view with "
               "gradient_as_bucket_view=True: ",
               parameter(index),
               ". A hook has replaced the gradient during backward; construct the module with "
               "gradient_as_bucket_view=False, or change the gradient in place."));
}

void ReducerErrors::incomplete_order(size_t arrived, size_t expected) {
  raise(c10::str("Buckets cannot be rebuilt: ", arrived, " gradients arrived in the first iteration, ", expected,
                 " were expected."));
}

}  // namespace ours
