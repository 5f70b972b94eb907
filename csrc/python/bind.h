#pragma once

#include <c10/core/Device.h>
#include <pybind11/pybind11.h>

#include <memory>

// What ourddp._C consists of: one function for each bind_*.cpp.

namespace ours {

class Device;

/// The options: their values and the table that documents them.
void bind_options(pybind11::module_& module);

/// The table of algorithms.
void bind_select(pybind11::module_& module);

/// The c10d backend and its creator.
void bind_backend(pybind11::module_& module);

/// The futures of collectives, whose callbacks may communicate.
void bind_futures(pybind11::module_& module);

/// What makes backends of torch that are engines.
void bind_engines(pybind11::module_& module);

/// The devices and the libraries that serve them.
void bind_devices(pybind11::module_& module);

/// The DDP reducer.
void bind_reducer(pybind11::module_& module);

/// Copies between gradients and buckets.
void bind_copies(pybind11::module_& module);

/// What copies gradients on a device of torch's with one kernel a bucket; null where nothing of this package does.
std::shared_ptr<Device> find_copier(c10::Device device);

}  // namespace ours
