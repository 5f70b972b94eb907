#pragma once

#include <pybind11/pybind11.h>

// What ourddp._C consists of: one function for each bind_*.cpp.

namespace ours {

/// The options: their values and the table that documents them.
void bind_options(pybind11::module_& module);

/// The table of algorithms.
void bind_select(pybind11::module_& module);

/// The c10d backend and its creator.
void bind_backend(pybind11::module_& module);

/// What makes backends of torch that are engines.
void bind_engines(pybind11::module_& module);

/// The DDP reducer.
void bind_reducer(pybind11::module_& module);

}  // namespace ours
