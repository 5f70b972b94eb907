#include <pybind11/chrono.h>
#include <pybind11/stl.h>
#include <sys/syscall.h>
#include <torch/csrc/utils/pybind.h>
#include <unistd.h>

#include "backend/flight_recorder.h"
#include "backend/process_group.h"
#include "backend/recent_calls.h"
#include "backend/symmetric/symmetric_allocator.h"
#include "backend/symmetric/symmetric_group.h"
#include "backend/symmetric/symmetric_ops.h"
#include "collectives/straggler_ledger.h"
#include "common/awaited.h"
#include "common/interpreter_lock.h"
#include "common/interrupts.h"
#include "common/other_failures.h"
#include "common/stop_request.h"
#include "common/whereabouts.h"
#include "operators/operators.h"
#include "python/bind.h"

namespace py = pybind11;

namespace ours {

namespace {

using GroupOptions = ProcessGroupOurs::Options;

/// Closes all groups when the program ends, while Python still works.
void close_groups_at_exit() {
  py::module_::import("atexit").attr("register")(py::cpp_function([] {
    py::gil_scoped_release unlocked;
    Lane::close_all();
    SymmetricGroup::leave_all();
  }));
}

/// Python runs signal handlers on its main thread, when that thread asks for it.
Interrupt run_signal_handlers() {
  const bool is_main = ::syscall(SYS_gettid) == ::getpid();
  if (!is_main || Py_IsInitialized() == 0) return {};
  const py::gil_scoped_acquire locked;
  if (PyErr_CheckSignals() == 0) return {};
  const py::error_already_set raised;
  return {raised.type().attr("__name__").cast<std::string>(), std::make_exception_ptr(raised)};
}

bool python_is_ending() {
#if PY_VERSION_HEX >= 0x030D0000
  return Py_IsInitialized() == 0 || Py_IsFinalizing() != 0;
#else
  return Py_IsInitialized() == 0 || _Py_IsFinalizing() != 0;
#endif
}

void* release_gil() { return !python_is_ending() && PyGILState_Check() != 0 ? PyEval_SaveThread() : nullptr; }

void restore_gil(void* state) {
  // Python would end this thread, and with it the process, since destructors may not be cut short.
  while (python_is_ending()) ::pause();
  PyEval_RestoreThread(static_cast<PyThreadState*>(state));
}

/// The calls of this process, and what keeps it from making others.
std::string describe_calls() {
  constexpr std::chrono::seconds kRecently{10};
  std::string failure = failure_since(Clock::now() - kRecently);
  failure.resize(std::min(failure.find('\n'), failure.size()));
  return describe_recent_calls() + describe_awaited() +
         (failure.empty() ? "" : "; a group of it has just failed: " + failure);
}

/// See set_whereabouts().
std::string describe_program() {
  const std::string at_the_end = "is at the end of its program; ";
  if (python_is_ending()) return at_the_end + describe_calls();
  const py::gil_scoped_acquire locked;
  if (python_is_ending()) return at_the_end + describe_calls();
  const auto thread = reinterpret_cast<uintptr_t>(last_caller());
  return py::module_::import("ourddp.whereabouts").attr("describe")(thread).cast<std::string>() + "; " +
         describe_calls();
}

/// See set_around_dump().
void keep_compiler_out(bool begins) {
  if (python_is_ending()) return;
  const py::gil_scoped_acquire locked;
  py::module_::import("ourddp.flight_traces").attr(begins ? "keep_compiler_out" : "let_compiler_in")();
}

py::dict dict_of(const StragglerTally& tally) {
  using namespace py::literals;
  return py::dict("elapsed"_a = tally.elapsed, "blocked"_a = tally.blocked, "calls"_a = tally.calls,
                  "bytes"_a = tally.bytes, "late"_a = tally.late, "last"_a = tally.last);
}

c10::intrusive_ptr<ProcessGroupOurs> create_backend(const c10d::DistributedBackendOptions& dist_options,
                                                    const py::object& backend_options) {
  c10::intrusive_ptr<GroupOptions> options;
  // If several backends serve a group, all of them get the same object, which may be meant for another one.
  if (py::isinstance<GroupOptions>(backend_options)) {
    options = c10::make_intrusive<GroupOptions>(*backend_options.cast<c10::intrusive_ptr<GroupOptions>>());
  } else {
    options = c10::make_intrusive<GroupOptions>();
  }
  options->timeout = std::chrono::duration_cast<std::chrono::milliseconds>(dist_options.timeout);
  options->group_name = dist_options.group_id;
  options->global_ranks_in_group.assign(dist_options.global_ranks_in_group.begin(),
                                        dist_options.global_ranks_in_group.end());
#ifdef C10D_BACKEND_HAS_RECONFIGURE
  options->enable_reconfigure = dist_options.enable_reconfigure;
#endif
  py::gil_scoped_release unlocked;
  return c10::make_intrusive<ProcessGroupOurs>(dist_options.store, dist_options.group_rank, dist_options.group_size,
                                               std::move(options));
}

}  // namespace

void bind_backend(py::module_& module) {
  // That module registers the base classes and the types of arguments.
  const py::module_ c10d = py::module_::import("torch._C._distributed_c10d");
  close_groups_at_exit();
  set_interrupt_check(run_signal_handlers);
  set_interpreter_lock(release_gil, restore_gil);
  set_whereabouts(describe_program);
  set_around_dump(keep_compiler_out);
  register_symmetric_memory();
  register_symmetric_ops();
  register_operators();

  auto group = py::class_<ProcessGroupOurs, c10d::Backend, c10::intrusive_ptr<ProcessGroupOurs>>(
      module, "ProcessGroupOurs",
      "The c10d backend \"ours\": collectives and messages of tensors on the CPU and one device.");
  group.def("failure", &ProcessGroupOurs::failure, py::call_guard<py::gil_scoped_release>(),
            "The message of the failure that ended the group, or an empty string.");
  group.def("heard_stop", &ProcessGroupOurs::heard_stop, py::call_guard<py::gil_scoped_release>(),
            "Whether a rank had been asked to stop before one of the all-reduces and barriers that were called so far. "
            "Waits for those that are under way.");
  group.def("node_sizes", &ProcessGroupOurs::node_sizes, "The number of ranks on each node.");
  group.def(
      "tally",
      [](ProcessGroupOurs& self, bool recent) {
        py::dict tally = dict_of(recent ? self.ledger().recent() : self.ledger().total());
        tally["ended"] = self.ledger().total().calls;
        tally["begun"] = self.getSequenceNumberForGroup();
        return tally;
      },
      py::arg("recent"),
      "What the group's collectives have cost this rank: a dict with the fields of StragglerTally, in microseconds, "
      "and how many calls were begun and have ended.");
  group.def("device_engine", &ProcessGroupOurs::device_engine,
            "What moves the data of tensors on this rank's device, and why; empty until it is first needed.");
  group.def(
      "perform_nocolor_split", [](const ProcessGroupOurs&, const py::object& /*device*/) {}, py::arg("device"),
      "Called by new_group() of a group that is bound to a device, on the ranks that are not in the new group. They "
      "have nothing to do here.");
  // Older versions of PyTorch bind these on each backend, newer ones on the base class.
  const py::object base = c10d.attr("Backend");
  if (!py::hasattr(base, "get_error")) {
    group.def("get_error", &ProcessGroupOurs::getError, py::call_guard<py::gil_scoped_release>(),
              "How the group has failed: an ErrorType.");
  }
  if (!py::hasattr(base, "options")) {
    group.def_property_readonly("options", &ProcessGroupOurs::getBackendOptions, "The options of the group.");
  }

  py::class_<GroupOptions, c10d::Backend::Options, c10::intrusive_ptr<GroupOptions>>(
      group, "Options", "The options of a group. timeout: how long its operations may take.")
      .def(py::init([](std::chrono::milliseconds timeout) { return c10::make_intrusive<GroupOptions>(timeout); }),
           py::arg("timeout") = kBackendDefaultTimeout)
      .def_readwrite("selection", &GroupOptions::selection,
                     "Rules of the table of algorithms for this group alone; empty: those of OURS_SELECT.");

  module.def("request_stop", &request_stop, "Note that somebody has asked this process to stop.");
  module.def("stop_requested", &stop_requested, "Whether somebody has asked this process to stop.");
  module.def("forget_stop_request", &forget_stop_request, "Forget it, in a forked child.");
  module.def("records_flights", &records_flights,
             "Whether the backend itself writes into PyTorch's FlightRecorder, so that it needs no hooks for it.");
  module.def(
      "create_backend", &create_backend, py::arg("dist_options"), py::arg("backend_options") = py::none(),
      "Make the backend of a process group, for torch.distributed.Backend.register_backend with extended_api=True. "
      "Blocks until all ranks have come. Raises DistBackendError if they do not come together within the timeout.");
}

}  // namespace ours
