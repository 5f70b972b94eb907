#include <pybind11/stl.h>

#include "collectives/hierarchical/rail_slices.h"
#include "collectives/select.h"
#include "python/bind.h"

namespace py = pybind11;

namespace ours {

void bind_select(py::module_& module) {
  module.def(
      "selection_table", [](const std::string& option) { return selection_from(option).table(); }, py::arg("option"),
      "The table of algorithms for a value of OURS_SELECT, with one rule on each line. Raises ValueError.");
  module.def(
      "choose_algorithm",
      [](const std::string& operation, int nodes, int local, size_t bytes, const std::string& option) {
        return name_of(selection_from(option).choose({selectable_of(operation), nodes, local, bytes}));
      },
      py::arg("operation"), py::arg("nodes"), py::arg("local"), py::arg("bytes"), py::arg("option") = "",
      "The algorithm that this table gives for an operation over `nodes` nodes, the largest of which has `local` "
      "ranks, "
      "and an array of `bytes` bytes. Raises ValueError.");
  module.def(
      "choose_rails",
      [](int nodes, int local, size_t bytes, bool ring) {
        const RailSlices slices = choose_rails({bytes, 1, 1, nodes, local, ring ? Algorithm::Ring : Algorithm::Direct});
        return std::pair(slices.rails, slices.chunks);
      },
      py::arg("nodes"), py::arg("local"), py::arg("bytes"), py::arg("ring") = false,
      "How many rails an array takes between nodes of `local` ranks, and in how many chunks.");
}

}  // namespace ours
