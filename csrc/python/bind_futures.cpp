#if defined(__GNUC__) && !defined(__clang__)
// GCC takes a function that torch's wrapper of futures does not have for one that is not initialised.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

#include <torch/csrc/jit/python/pybind_utils.h>
#include <torch/csrc/utils/pybind.h>

#include <chrono>
#include <memory>
#include <utility>

#include "backend/callback.h"
#include "backend/coalesced_work.h"
#include "backend/collective_work.h"
#include "python/bind.h"

// Futures of collectives that know which callback they run. Those of c10 cannot be derived from, and run callbacks that
// are attached too late at once; but Python attaches through a wrapper, for which there is another one here.

namespace py = pybind11;

namespace ours {
namespace {

using PyFuture = torch::jit::PythonFutureWrapper;
using FuturePtr = c10::intrusive_ptr<c10::ivalue::Future>;

/// torch's holder of Works, by which it and this module must agree in size: drops them without the GIL, since their
/// ends may wait for threads that want it.
template <class T>
class WorkHolder {
 public:
  WorkHolder() = default;
  explicit WorkHolder(T* work) : work_(c10::intrusive_ptr<T>::unsafe_steal_from_new(work)) {}
  WorkHolder(const WorkHolder&) = default;
  WorkHolder& operator=(const WorkHolder&) = default;
  WorkHolder(WorkHolder&&) noexcept = default;
  WorkHolder& operator=(WorkHolder&&) noexcept = default;
  ~WorkHolder() {
    if (!work_ || Py_IsInitialized() == 0 || PyGILState_Check() == 0) return;
    const py::gil_scoped_release unlocked;
    work_.reset();
  }
  T* get() const { return work_.get(); }

 private:
  c10::intrusive_ptr<T> work_;
};

/// It has two bases that know its shared pointer. pybind11 would ask torch's wrapper, which it cannot, as that is not
/// polymorphic; so it asks the other.
class OrderedFuture : public PyFuture, public std::enable_shared_from_this<OrderedFuture> {
 public:
  /// `patience`: how long callbacks wait for those before them.
  OrderedFuture(FuturePtr future, Origin origin, std::chrono::milliseconds patience)
      : PyFuture(std::move(future)), origin_(std::move(origin)), patience_(patience) {}

  std::shared_ptr<OrderedFuture> then(py::function body) {
    py::function ordered = in_order(std::move(body));
    const py::gil_scoped_release unlocked;
    return std::make_shared<OrderedFuture>(plain()->then(std::move(ordered))->fut, origin_, patience_);
  }

  void add_done_callback(py::function body) {
    py::function ordered = in_order(std::move(body));
    const py::gil_scoped_release unlocked;
    plain()->add_done_callback(std::move(ordered));
  }

 private:
  std::shared_ptr<PyFuture> plain() const { return std::make_shared<PyFuture>(fut); }

  /// `body` as a callback that has its place in the order from now on, and gets a future like this one. It begins when
  /// those before it have returned: programs expect that callbacks do not overlap, as torch's hooks that step ZeRO's
  /// optimizer do.
  py::function in_order(py::function body) const {
    return py::cpp_function([callback = std::make_shared<Callback>(origin_), body = std::move(body), future = fut,
                             origin = origin_, patience = patience_](const py::object&) {
      // Also where its turn does not come: those after it do not wait for it any more.
      const Callback::Running running(*callback);
      {
        const py::gil_scoped_release unlocked;
        callback->await_turn(patience);
      }
      return py::object(body(std::make_shared<OrderedFuture>(future, origin, patience)));
    });
  }

  const Origin origin_;
  const std::chrono::milliseconds patience_;
};

std::shared_ptr<OrderedFuture> future_of(CollectiveWork& work) {
  return std::make_shared<OrderedFuture>(work.getFuture(), work.origin(), work.getTimeout());
}

py::object future_of_several(CoalescedWork& work) {
  const std::optional<Origin> origin = work.origin();
  if (!origin) return py::cast(std::make_shared<PyFuture>(work.getFuture()));
  return py::cast(std::make_shared<OrderedFuture>(work.getFuture(), *origin, kBackendDefaultTimeout));
}

}  // namespace
}  // namespace ours

PYBIND11_DECLARE_HOLDER_TYPE(T, ours::WorkHolder<T>, true)

namespace ours {

void bind_futures(py::module_& module) {
  // The base classes are registered there.
  py::module_::import("torch._C._distributed_c10d");
  py::class_<OrderedFuture, PyFuture, std::shared_ptr<OrderedFuture>>(
      module, "OrderedFuture",
      "The future of a collective. Callbacks on it may start other collectives: those are matched by the order in "
      "which callbacks were attached, not by the moment.")
      .def("then", &OrderedFuture::then, py::arg("callback"),
           "Call callback(future) when the future is complete, or now. Returns the future of the result.")
      .def("add_done_callback", &OrderedFuture::add_done_callback, py::arg("callback"),
           "Call callback(future) when the future is complete, or now.");
  py::class_<CollectiveWork, c10d::Work, WorkHolder<CollectiveWork>>(module, "CollectiveWork", "One collective.")
      .def("get_future", &future_of, "The future of the outputs.");
  py::class_<CoalescedWork, c10d::Work, WorkHolder<CoalescedWork>>(module, "CoalescedWork",
                                                                   "Several operations that are waited for as one.")
      .def("get_future", &future_of_several, "The future of all outputs.");
}

}  // namespace ours
