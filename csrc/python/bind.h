#pragma once

#include <c10/core/Device.h>
#include <pybind11/pybind11.h>

#include <memory>

// The parts of ourddp._C: one function for each bind_*.cpp.

namespace ours {

class Device;

/// The options: their values, and the table that documents them.
void bind_options(pybind11::module_& module);

/// The table of algorithms.
void bind_select(pybind11::module_& module);

/// The c10d backend and its creator.
void bind_backend(pybind11::module_& module);

/// The futures of collectives, whose callbacks may communicate.
void bind_futures(pybind11::module_& module);

/// The maker of torch's backends that serve as engines.
void bind_engines(pybind11::module_& module);

/// The devices and the libraries that serve them.
void bind_devices(pybind11::module_& module);

/// The DDP reducer.
void bind_reducer(pybind11::module_& module);

/// Copies between gradients and buckets.
void bind_copies(pybind11::module_& module);

/// The device of torch's that copies gradients with one kernel for each bucket; null if this package does not serve it.
std::shared_ptr<Device> find_copier(c10::Device device);

}  // namespace ours
