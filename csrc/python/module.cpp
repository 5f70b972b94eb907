#include "common/error.h"
#include "python/bind.h"

namespace py = pybind11;

// torch's build names the module through TORCH_EXTENSION_NAME.
PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  module.doc() = "The C++ core of ourddp.";
  // Every error of the library is a std::runtime_error, so RuntimeError in Python; a misuse is a ValueError.
  py::register_local_exception_translator([](std::exception_ptr error) {
    try {
      std::rethrow_exception(error);
    } catch (const ours::InvalidArgument& misuse) {
      py::set_error(PyExc_ValueError, misuse.what());
    }
  });
  ours::bind_options(module);
  ours::bind_select(module);
  ours::bind_backend(module);
  ours::bind_engines(module);
  ours::bind_devices(module);
  ours::bind_reducer(module);
  ours::bind_copies(module);
}
