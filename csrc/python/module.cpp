#include "backend/errors.h"
#include "common/error.h"
#include "python/bind.h"

namespace py = pybind11;

namespace {

/// torch has no exception type that is both, so its own translation of C++ errors cannot handle this one.
void add_misuse_error(py::module_& module) {
  static PyObject* const kType = PyErr_NewExceptionWithDoc(
      "ourddp.MisuseError",
      "An invalid call. Other backends raise ValueError for some of these, and RuntimeError for others.",
      py::make_tuple(py::handle(PyExc_ValueError), py::handle(PyExc_RuntimeError)).ptr(), nullptr);
  if (kType == nullptr) throw py::error_already_set();
  module.attr("MisuseError") = py::handle(kType);
  // Registered for torch's bindings too, since most calls of a group come through them.
  py::register_exception_translator([](std::exception_ptr error) {
    try {
      if (error) std::rethrow_exception(error);
    } catch (const ours::MisuseError& misuse) {
      py::set_error(kType, misuse.what_without_backtrace());
    }
  });
}

}  // namespace

// torch's build names the module through TORCH_EXTENSION_NAME.
PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  module.doc() = "The C++ core of ourddp.";
  // Every error of the library is a std::runtime_error, so RuntimeError in Python; InvalidArgument becomes ValueError.
  py::register_local_exception_translator([](std::exception_ptr error) {
    try {
      std::rethrow_exception(error);
    } catch (const ours::InvalidArgument& misuse) {
      py::set_error(PyExc_ValueError, misuse.what());
    }
  });
  add_misuse_error(module);
  ours::bind_launch(module);
  ours::bind_network(module);
  ours::bind_options(module);
  ours::bind_select(module);
  ours::bind_backend(module);
  ours::bind_futures(module);
  ours::bind_engines(module);
  ours::bind_devices(module);
  ours::bind_timeline(module);
  ours::bind_reducer(module);
  ours::bind_sharing(module);
}
