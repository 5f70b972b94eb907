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
#include "python/bind.h"

// Futures of collectives that know which callback they run. c10's futures cannot be derived from, and run a callback at
// once if it is attached after completion. But Python attaches callbacks through a wrapper, which is replaced here.

namespace py = pybind11;

namespace ours {
namespace {

using PyFuture = torch::jit::PythonFutureWrapper;
using FuturePtr = c10::intrusive_ptr<c10::ivalue::Future>;

/// A holder like torch's own holder of Works, with which it has to agree in size: it drops Works without the GIL, since
/// their ends may wait for threads that need it.
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
  /// `patience`: how long callbacks wait for those before them.
  OrderedFuture(FuturePtr future, Origin origin, std::chrono::milliseconds patience)
      : PyFuture(std::move(future)), origin_(std::move(origin)), patience_(patience) {}

  std::shared_ptr<OrderedFuture> then(py::function body) {
    auto child = fut->createInstance(c10::PyObjectType::get());
    attach(std::move(body), child);
    return std::make_shared<OrderedFuture>(std::move(child), origin_, patience_);
  }

  void add_done_callback(py::function body) { attach(std::move(body), nullptr); }

 private:
  void attach(py::function body, FuturePtr child);

  const Origin origin_;
  const std::chrono::milliseconds patience_;
};

/// A callback of the program, which has its place in the order from the moment it is attached. It begins when those
/// before it have returned, since programs expect that callbacks do not overlap: torch's hooks that step ZeRO's
/// optimizer do.
class Step : public std::enable_shared_from_this<Step> {
 public:
  /// `child` gets the result of `body`; null if nobody wants it.
  Step(py::function body, FuturePtr parent, FuturePtr child, Origin origin, std::chrono::milliseconds patience)
      : callback_(origin),
        body_(std::move(body)),
        parent_(std::move(parent)),
        child_(std::move(child)),
        origin_(std::move(origin)),
        patience_(patience) {}
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
    const Callback::Running running(callback_);
    callback_.await_turn(patience_);
    parent_->wait();  // it is complete; this makes the streams of this thread, which may be another one, come after it
    const py::gil_scoped_acquire locked;
    try {
      const py::object result = body_(std::make_shared<OrderedFuture>(parent_, origin_, patience_));
      return torch::jit::toIValue(result, c10::PyObjectType::get());
    } catch (const py::error_already_set& e) {
      // As text only: Python's exception could be dropped on any thread.
      TORCH_CHECK(false, "a callback on the future of collective number ", origin_.number, " raised ", e.what());
    }
  }

  Callback callback_;
  py::function body_;
  const FuturePtr parent_;
  const FuturePtr child_;
  const Origin origin_;
  const std::chrono::milliseconds patience_;
};

void OrderedFuture::attach(py::function body, FuturePtr child) {
  auto step = std::make_shared<Step>(std::move(body), fut, std::move(child), origin_, patience_);
  const py::gil_scoped_release unlocked;
  const Attaching now(true);
  fut->addCallback([step = std::move(step)](c10::ivalue::Future&) { step->begin(); });
}

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
  // That module registers the base classes.
  py::module_::import("torch._C._distributed_c10d");
  py::class_<OrderedFuture, PyFuture, std::shared_ptr<OrderedFuture>>(
      module, "OrderedFuture",
      "The future of a collective. Callbacks on it may start other collectives. These are matched across ranks by the "
      "order in which the callbacks were attached, not by when they run.")
      .def("then", &OrderedFuture::then, py::arg("callback"),
           "Call callback(future) when the future is complete, or now if it is. Returns the future of the result.")
      .def("add_done_callback", &OrderedFuture::add_done_callback, py::arg("callback"),
           "Call callback(future) when the future is complete, or now if it is.");
  py::class_<CollectiveWork, c10d::Work, WorkHolder<CollectiveWork>>(module, "CollectiveWork", "A collective.")
      .def("get_future", &future_of, "The future of the outputs.");
  py::class_<CoalescedWork, c10d::Work, WorkHolder<CoalescedWork>>(module, "CoalescedWork",
                                                                   "Several operations that are waited for as one.")
      .def("get_future", &future_of_several, "The future of all outputs.");
}

}  // namespace ours
