#include <pybind11/chrono.h>
#include <torch/csrc/utils/pybind.h>

#include "backend/joining/engine_choice.h"
#include "common/error.h"
#include "python/bind.h"

namespace py = pybind11;

namespace ours {

namespace {

/// Python functions that make backends. They are never freed, since the last owner might not hold the GIL.
class PythonBackendMaker final : public BackendMaker {
 public:
  PythonBackendMaker(py::object obstacle, py::object make) : obstacle_(obstacle.release()), make_(make.release()) {}

  std::string obstacle(const std::string& name) override {
    return call([&] { return obstacle_(name).cast<std::string>(); });
  }
  c10::intrusive_ptr<c10d::Backend> make(const BackendRequest& request) override {
    return call([&] {
      return make_(request.name, request.store, request.rank, request.size, request.timeout, request.address)
          .cast<c10::intrusive_ptr<c10d::Backend>>();
    });
  }

 private:
  template <class Body>
  auto call(const Body& body) -> decltype(body()) {
    const py::gil_scoped_acquire locked;
    try {
      return body();
    } catch (const py::error_already_set& error) {
      throw Error(py::str(error.value()).cast<std::string>());
    } catch (const py::cast_error& error) {
      throw Error(std::string("what was made is not a backend: ") + error.what());
    }
  }

  const py::handle obstacle_;
  const py::handle make_;
};

}  // namespace

void bind_engines(py::module_& module) {
  // That module registers the types of arguments.
  py::module_::import("torch._C._distributed_c10d");
  module.def(
      "set_backend_maker",
      [](py::object obstacle, py::object make) {
        set_backend_maker(std::make_unique<PythonBackendMaker>(std::move(obstacle), std::move(make)));
      },
      py::arg("obstacle"), py::arg("make"),
      "Set how the backend that OURS_INTERNODE names is made: obstacle(name) returns why it cannot be made, or an "
      "empty "
      "string; make(name, store, rank, size, timeout, address) returns it.");
}

}  // namespace ours
