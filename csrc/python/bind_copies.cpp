#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <vector>

#include "backend/device/devices.h"
#include "python/bind.h"
#include "reducer/device_copies.h"

// The copies between gradients and buckets, for benchmarks and tests.

namespace py = pybind11;

namespace ours {
namespace {

using NoGil = py::call_guard<py::gil_scoped_release>;
using Copy = void (*)(Device&, const at::Tensor&, const std::vector<PlacedTensor>&, double);

void copy_all(Copy copy, const at::Tensor& flat, const std::vector<at::Tensor>& tensors, double scale) {
  const std::shared_ptr<Device> device = find_copier(flat.device());
  TORCH_CHECK(device != nullptr, "No library of this package serves ", flat.device(), ".");
  std::vector<PlacedTensor> placed;
  int64_t offset = 0;
  for (const at::Tensor& tensor : tensors) {
    TORCH_CHECK_VALUE(tensor.is_non_overlapping_and_dense() && tensor.device() == flat.device(),
                      "All tensors have to be dense, and on ", flat.device(), ".");
    placed.push_back({tensor, offset});
    offset += tensor.numel();
  }
  TORCH_CHECK_VALUE(flat.is_contiguous(), "The flat tensor has to be contiguous.");
  copy(*device, flat, placed, scale);
}

}  // namespace

std::shared_ptr<Device> find_copier(c10::Device device) {
  if (!serves_devices(device.type())) return nullptr;
  try {
    return device_library_of(device.type()).device(device.has_index() ? device.index() : 0);
  } catch (const DeviceError&) {
    return nullptr;  // another backend may serve the device
  }
}

void bind_copies(py::module_& module) {
  const auto bind = [&module](const char* name, Copy copy, const char* what) {
    module.def(
        name,
        [copy](const at::Tensor& flat, const std::vector<at::Tensor>& tensors, double scale) {
          copy_all(copy, flat, tensors, scale);
        },
        py::arg("flat"), py::arg("tensors"), py::arg("scale") = 1.0, NoGil(), what);
  };
  bind("flatten", flatten,
       "Copy the tensors, multiplied by scale, one after another into the contiguous tensor flat, with one kernel. All "
       "are dense and on one device. Raises ValueError otherwise.");
  bind("unflatten", unflatten,
       "The reverse of flatten(): copy the parts of flat, multiplied by scale, into the tensors.");
}

}  // namespace ours
