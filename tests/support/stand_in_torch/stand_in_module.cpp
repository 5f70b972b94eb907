#include <pybind11/pybind11.h>

#include "stand_in_torch.h"

// What tests do with the devices from Python.

namespace stand_in {

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  module.doc() = "The stand-in devices as a device of torch.";
  module.def("device_count", &device_count);
  module.def("current_device", &current_device);
  module.def("set_capturing", [](bool capturing) {
    const c10::DeviceIndex index = current_device();
    device(index).set_capturing(handle_of(current_stream(index)), capturing);
  });
  using ours::testing::StandInPoint;
  pybind11::class_<StandInPoint, std::shared_ptr<StandInPoint>>(module, "StoppedStream")
      .def("go_on", &StandInPoint::reach)
      .def("awaited", &StandInPoint::awaited);
  module.def("stop_current_stream", [] {
    const c10::DeviceIndex index = current_device();
    return device(index).stop(handle_of(current_stream(index)));
  });
  module.def("stop_copies", [] { return device(current_device()).stop_copies(); });
  module.def(
      "synchronize", [] { synchronize(current_device()); }, pybind11::call_guard<pybind11::gil_scoped_release>());
}

}  // namespace stand_in
