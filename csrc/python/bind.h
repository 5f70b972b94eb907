#pragma once

#include <c10/core/Device.h>
#include <pybind11/pybind11.h>

#include <memory>

// The parts of ourddp._C: one function for each bind_*.cpp.

namespace ours {

class Device;

void bind_options(pybind11::module_& module);
void bind_select(pybind11::module_& module);
void bind_backend(pybind11::module_& module);
void bind_futures(pybind11::module_& module);
void bind_engines(pybind11::module_& module);
void bind_devices(pybind11::module_& module);
void bind_reducer(pybind11::module_& module);
void bind_copies(pybind11::module_& module);

/// The Device that copies gradients on torch's `device` with one kernel for each bucket; null if there is none.
std::shared_ptr<Device> find_copier(c10::Device device);

}  // namespace ours
