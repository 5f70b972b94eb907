#if defined(__GNUC__) && !defined(__clang__)
// GCC reports a member as uninitialised that torch's wrapper of futures does not use.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

#include <torch/csrc/jit/python/pybind_utils.h>
#include <torch/csrc/utils/pybind.h>

#include <chrono>
#include <exception>
#include <memory>
#include <utility>

#include "backend/callback.h"
#include "backend/coalesced_work.h"
#include "backend/collective_work.h"
#include "backend/device/device_transfer_work.h"
#include "python/bind.h"
#include "python/unlocked_pointer.h"

// Futures of collectives that know which callback they run. c10's futures cannot be derived from, and run a callback at
// once if it is attached after completion. But Python attaches callbacks through a wrapper, which is replaced here.

namespace py = pybind11;

namespace ours {
namespace {

using PyFuture = torch::jit::PythonFutureWrapper;
using FuturePtr = c10::intrusive_ptr<c10::ivalue::Future>;

/// A holder like torch's own holder of Works, with which it has to agree in size.
template <class T>
struct WorkHolder : UnlockedPointer<c10::intrusive_ptr<T>> {
  WorkHolder() = default;
  explicit WorkHolder(T* work)
      : UnlockedPointer<c10::intrusive_ptr<T>>(c10::intrusive_ptr<T>::unsafe_steal_from_new(work)) {}
};

/// Whether this thread is attaching a callback, which runs now if its future is complete.
bool& attaching() {
  thread_local bool now = false;
  return now;
}

class Attaching {
 public:
  explicit Attaching(bool now) : before_(std::exchange(attaching(), now)) {}
  ~Attaching() { attaching() = before_; }
  Attaching(const Attaching&) = delete;
  Attaching& operator=(const Attaching&) = delete;

 private:
  const bool before_;
};

/// Both bases know the shared pointer. pybind11 would ask torch's wrapper, which is impossible since that class is not
/// polymorphic; with enable_shared_from_this here it asks this class.
class OrderedFuture : public PyFuture, public std::enable_shared_from_this<OrderedFuture> {
 public:
  OrderedFuture(FuturePtr future, Origin from, std::chrono::milliseconds limit)
      : PyFuture(std::move(future)), origin(std::move(from)), patience(limit) {}

  const Origin origin;                       ///< of callbacks on it
  const std::chrono::milliseconds patience;  ///< how long callbacks wait for those before them
};

using OrderedFuturePtr = std::shared_ptr<OrderedFuture>;

/// A callback of the program, which has its place in the order from the moment it is attached. It begins when those
/// before it have returned, since programs expect that callbacks do not overlap: torch's hooks that step ZeRO's
/// optimizer do.
class Step : public std::enable_shared_from_this<Step> {
 public:
  /// `child` gets the result of `body`; null if nobody wants it.
  Step(py::function body, OrderedFuturePtr parent, FuturePtr child)
      : callback_(parent->origin), body_(std::move(body)), parent_(std::move(parent)), child_(std::move(child)) {}
  Step(const Step&) = delete;
  Step& operator=(const Step&) = delete;
  ~Step() {
    if (Py_IsInitialized() == 0) {
      body_.release();
      return;
    }
    const py::gil_scoped_acquire locked;
    body_ = py::function();
  }

  /// Called when its future is complete, by a thread that may still have to run the callbacks before this one.
  void begin() {
    const bool may_wait = attaching();
    const Attaching no(false);
    if (may_wait || callback_.has_turn()) return run();
    callback_.hand_over([self = shared_from_this()] { self->run(); });
  }

 private:
  void run() noexcept {
    std::exception_ptr error;
    c10::IValue result;
    try {
      result = call();
    } catch (const std::exception& e) {
      error = std::current_exception();
      if (!child_) TORCH_WARN(e.what());
    }
    if (!child_) return;
    try {
      if (error) std::rethrow_exception(error);
      child_->markCompleted(std::move(result));
    } catch (...) {
      child_->setErrorIfNeeded(std::current_exception());
    }
  }

  c10::IValue call() {
    // If its turn does not come, the callbacks after it stop waiting for it.
    const Callback::Running running(&callback_);
    callback_.await_turn(parent_->patience);
    // It is complete; this makes the streams of this thread, which may be another one, come after it.
    parent_->fut->wait();
    const py::gil_scoped_acquire locked;
    try {
      return torch::jit::toIValue(body_(parent_), c10::PyObjectType::get());
    } catch (const py::error_already_set& e) {
      // As text only: Python's exception could be dropped on any thread.
      TORCH_CHECK(false, "a callback on the future of collective number ", parent_->origin.number, " raised ",
                  e.what());
    }
  }

  Callback callback_;
  py::function body_;
  const OrderedFuturePtr parent_;
  const FuturePtr child_;
};

void attach(const OrderedFuturePtr& to, py::function body, FuturePtr child) {
  auto step = std::make_shared<Step>(std::move(body), to, std::move(child));
  const py::gil_scoped_release unlocked;
  const Attaching now(true);
  to->fut->addCallback([step = std::move(step)](c10::ivalue::Future&) { step->begin(); });
}

OrderedFuturePtr then(const OrderedFuturePtr& self, py::function body) {
  auto child = self->fut->createInstance(c10::PyObjectType::get());
  attach(self, std::move(body), child);
  return std::make_shared<OrderedFuture>(std::move(child), self->origin, self->patience);
}

void add_done_callback(const OrderedFuturePtr& self, py::function body) { attach(self, std::move(body), nullptr); }

OrderedFuturePtr future_of(CollectiveWork& work) {
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
namespace {

/// torch's binding of synchronize() holds the GIL, since with other backends only streams wait there; but here the host
/// may wait, and the Work's end may need the GIL to drop Python tensors.
template <class T>
py::class_<T, c10d::Work, WorkHolder<T>> bind_work(py::module_& module, const char* name, const char* what) {
  py::class_<T, c10d::Work, WorkHolder<T>> bound(module, name, what);
  bound.def("synchronize", &T::synchronize, py::call_guard<py::gil_scoped_release>(),
            "Wait until the current stream may use results on a device. What went wrong is for wait() to raise.");
  return bound;
}

}  // namespace

void bind_futures(py::module_& module) {
  // That module registers the base classes.
  py::module_::import("torch._C._distributed_c10d");
  py::class_<OrderedFuture, PyFuture, std::shared_ptr<OrderedFuture>>(
      module, "OrderedFuture",
      "The future of a collective. Callbacks on it may start other collectives. These are matched across ranks by the "
      "order in which the callbacks were attached, not by when they run.")
      .def("then", &then, py::arg("callback"),
           "Call callback(future) when the future is complete, or now if it is. Returns the future of the result.")
      .def("add_done_callback", &add_done_callback, py::arg("callback"),
           "Call callback(future) when the future is complete, or now if it is.");
  bind_work<CollectiveWork>(module, "CollectiveWork", "A collective.")
      .def("get_future", &future_of, "The future of the outputs.");
  bind_work<CoalescedWork>(module, "CoalescedWork", "Several operations that are waited for as one.")
      .def("get_future", &future_of_several, "The future of all outputs.");
  bind_work<DeviceTransferWork>(module, "DeviceTransferWork", "A send or a receive of a device's tensor.");
}

}  // namespace ours
