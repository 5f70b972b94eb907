#include <torch/csrc/utils/pybind.h>

#include "backend/process_group.h"
#include "python/bind.h"
#include "reducer/lending_allocator.h"

namespace py = pybind11;

namespace ours {

void bind_sharing(py::module_& module) {
  module.def(
      "begin_sharing_tensors",
      [](ProcessGroupOurs& backend, size_t least) { begin_sharing_tensors(backend.getMemAllocator(), least); },
      py::arg("backend"), py::arg("least"),
      "Give the CPU tensors of at least so many bytes that this thread makes memory of the group's heap.");
  module.def("end_sharing_tensors", &end_sharing_tensors, "End what this thread has begun last.");
}

}  // namespace ours
