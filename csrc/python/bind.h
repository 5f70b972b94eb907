#pragma once

#include <pybind11/pybind11.h>

// The parts of ourddp._C: one function for each bind_*.cpp.

namespace ours {

void bind_launch(pybind11::module_& module);
void bind_network(pybind11::module_& module);
void bind_options(pybind11::module_& module);
void bind_select(pybind11::module_& module);
void bind_backend(pybind11::module_& module);
void bind_futures(pybind11::module_& module);
void bind_engines(pybind11::module_& module);
void bind_devices(pybind11::module_& module);
void bind_timeline(pybind11::module_& module);
void bind_reducer(pybind11::module_& module);
void bind_sharing(pybind11::module_& module);

}  // namespace ours
