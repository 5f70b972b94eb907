#include "common/timeline.h"
#include "python/bind.h"

namespace py = pybind11;

namespace ours {

void bind_timeline(py::module_& module) {
  module.def("start_timeline", &timeline::start, py::arg("path"), py::arg("rank"), py::arg("offset_ns"));
  module.def("stop_timeline", &timeline::stop, py::call_guard<py::gil_scoped_release>());
  module.def("timeline_is_on", &timeline::is_on);
}

}  // namespace ours
