#include <c10/core/Device.h>
#include <pybind11/stl.h>

#include "backend/device/devices.h"
#include "python/bind.h"

namespace py = pybind11;

namespace ours {

namespace {

c10::DeviceType type_named(const std::string& device) { return c10::Device(device).type(); }

py::dict facts_of(const std::string& device_type) {
  const DeviceReport facts = report_devices(type_named(device_type));
  py::dict shown;
  shown["obstacle"] = facts.obstacle;
  shown["library"] = facts.library;
  shown["devices"] = facts.devices;
  shown["device_obstacle"] = facts.device_obstacle;
  shown["vendor_version"] = facts.vendor_version;
  shown["vendor_obstacle"] = facts.vendor_obstacle;
  return shown;
}

}  // namespace

void bind_devices(py::module_& module) {
  module.def("device_facts", &facts_of, py::arg("device_type"),
             "What there is for devices of a type such as \"cuda\": obstacle, library, devices, "
             "device_obstacle, vendor_version, vendor_obstacle.");
  module.def(
      "use_device_library",
      [](const std::string& device_type, const std::string& path) {
        use_device_library(type_named(device_type), path);
      },
      py::arg("device_type"), py::arg("path"),
      "From now on the library at `path` serves devices of that type. For tests, which have devices of their own.");
}

}  // namespace ours
