#include <c10/core/Device.h>
#include <pybind11/stl.h>

#include "backend/device/devices.h"
#include "python/bind.h"

namespace py = pybind11;

namespace ours {

namespace {

c10::DeviceType type_named(const std::string& device) { return c10::Device(device).type(); }

py::dict facts_of(const std::string& device_type) {
  py::dict facts;
  for (const char* text : {"obstacle", "library", "device_obstacle", "vendor_version", "vendor_obstacle"}) {
    facts[text] = "";
  }
  facts["devices"] = py::list();
  DeviceLibrary* library = nullptr;
  try {
    library = &device_library_of(type_named(device_type));
  } catch (const Error& e) {
    facts["obstacle"] = e.what();
    return facts;
  }
  facts["library"] = library->describe();
  facts["vendor_version"] = library->vendor_version();
  facts["vendor_obstacle"] = library->why_no_vendor_group();
  try {
    facts["devices"] = library->device_names();
  } catch (const DeviceError& e) {
    facts["device_obstacle"] = e.what();
  }
  return facts;
}

}  // namespace

void bind_devices(py::module_& module) {
  module.def(
      "device_facts", &facts_of, py::arg("device_type"),
      "What there is for devices of a type such as \"cuda\": obstacle (why there is no library for them), library, "
      "devices (their names), device_obstacle (why those cannot be found out), vendor_version (of the vendor's "
      "library for collectives), vendor_obstacle (why that cannot be used). What does not apply is empty.");
  module.def(
      "use_device_library",
      [](const std::string& device_type, const std::string& path) {
        use_device_library(type_named(device_type), path);
      },
      py::arg("device_type"), py::arg("path"),
      "From now on the library at `path` serves devices of that type. For tests, which have devices of their own.");
}

}  // namespace ours
