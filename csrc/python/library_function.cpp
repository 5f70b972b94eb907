#include "python/library_function.h"

#include <pybind11/pybind11.h>
#include <torch/csrc/autograd/python_cpp_function.h>

#include <algorithm>
#include <array>
#include <string>

namespace py = pybind11;

namespace ours {
namespace {

/// Not all of torch: checkpoints run a backward of their own, and torch.library's operators run the program's
/// functions.
constexpr std::array kModules = {"torch.nn.", "torch.distributed.", "torch._functorch._aot_autograd.", "ourddp."};

}  // namespace

bool is_library_function(torch::autograd::Node& node) {
  const py::gil_scoped_acquire gil;
  const auto function = py::reinterpret_steal<py::object>(torch::autograd::functionToPyObject(node.getptr()));
  // The class that the program has written; the node's own class is made from it.
  const py::object written = py::getattr(py::type::of(function), "_forward_cls", py::none());
  const auto module = py::cast<std::string>(py::str(py::getattr(written, "__module__", py::str())));
  return std::any_of(kModules.begin(), kModules.end(),
                     [&](const char* prefix) { return module.rfind(prefix, 0) == 0; });
}

}  // namespace ours
