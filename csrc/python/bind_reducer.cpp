#include <pybind11/functional.h>
#include <pybind11/stl.h>
#include <torch/csrc/distributed/c10d/python_comm_hook.h>
#include <torch/csrc/jit/python/pybind_utils.h>
#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/default_comm_hooks.hpp>
#include <utility>

#include "python/bind.h"
#include "python/library_function.h"
#include "python/unlocked_pointer.h"
#include "reducer/bucket_assignment.h"
#include "reducer/bucket_plan.h"
#include "reducer/comm_hooks.h"
#include "reducer/model_check.h"
#include "reducer/reducer.h"

// The reducer for Python, under the names by which torch's DistributedDataParallel class calls its own. Every call that
// may wait or take the reducer's lock releases the GIL, as a thread in backward may hold that lock and wait for the
// GIL.

namespace py = pybind11;

namespace ours {
namespace {

/// A reducer may be the last owner of its group.
template <class T>
struct UnlockedHolder : UnlockedPointer<std::shared_ptr<T>> {
  using element_type = T;  // pybind11 asks the object for its owner
  using UnlockedPointer<std::shared_ptr<T>>::UnlockedPointer;
  explicit UnlockedHolder(T* object) : UnlockedPointer<std::shared_ptr<T>>(object->shared_from_this()) {}
};

}  // namespace
}  // namespace ours

PYBIND11_DECLARE_HOLDER_TYPE(T, ours::UnlockedHolder<T>)

namespace ours {
namespace {

using PyFuture = torch::jit::PythonFutureWrapper;
using NoGil = py::call_guard<py::gil_scoped_release>;
using ReducerHolder = UnlockedHolder<Reducer>;
using ReducerClass = py::class_<Reducer, ReducerHolder>;

std::shared_ptr<PyFuture> wrap(Reducer::FuturePtr future) { return std::make_shared<PyFuture>(std::move(future)); }

void bind_options_struct(py::module_& module) {
  py::class_<ReducerOptions>(module, "ReducerOptions")
      .def(py::init<>())
      .def_readwrite("bucket_indices", &ReducerOptions::bucket_indices)
      .def_readwrite("expect_sparse_gradients", &ReducerOptions::expect_sparse_gradients)
      .def_readwrite("parameter_names", &ReducerOptions::parameter_names)
      .def_readwrite("bucket_bytes_cap", &ReducerOptions::bucket_bytes_cap)
      .def_readwrite("first_bucket_bytes_cap", &ReducerOptions::first_bucket_bytes_cap)
      .def_readwrite("bucket_bytes_cap_list", &ReducerOptions::bucket_bytes_cap_list)
      .def_readwrite("tune_bucket_size", &ReducerOptions::tune_bucket_size)
      .def_readwrite("find_unused_parameters", &ReducerOptions::find_unused_parameters)
      .def_readwrite("gradient_as_bucket_view", &ReducerOptions::gradient_as_bucket_view)
      .def_readwrite("skip_all_reduce_unused_params", &ReducerOptions::skip_all_reduce_unused_params)
      .def_readwrite("batched_grad_copy", &ReducerOptions::batched_grad_copy)
      .def_readwrite("bad_gradients", &ReducerOptions::bad_gradients)
      .def_readwrite("lazy_bucket_allocation", &ReducerOptions::lazy_bucket_allocation)
      .def_readwrite("attach_to_autograd", &ReducerOptions::attach_to_autograd);
}

void bind_bucket_times(py::module_& module) {
  py::class_<BucketTimes>(module, "BucketTimes", "Times of one bucket in nanoseconds; -1: did not happen.")
      .def_readonly("launched", &BucketTimes::launched)
      .def_readonly("first_gradient", &BucketTimes::first_gradient)
      .def_readonly("last_gradient", &BucketTimes::last_gradient)
      .def_readonly("reduction_began", &BucketTimes::reduction_began)
      .def_readonly("reduction_ended", &BucketTimes::reduction_ended)
      .def_readonly("end_is_exact", &BucketTimes::end_is_exact);
  py::class_<BackwardTimes>(module, "BackwardTimes", "Times of one backward in nanoseconds; iteration 0: none yet.")
      .def_readonly("iteration", &BackwardTimes::iteration)
      .def_readonly("began", &BackwardTimes::began)
      .def_readonly("compute_ended", &BackwardTimes::compute_ended)
      .def_readonly("ended", &BackwardTimes::ended)
      .def_readonly("buckets", &BackwardTimes::buckets)
      .def_property_readonly(
          "parameters", [](const BackwardTimes& self) { return self.layout ? self.layout->parameters : Buckets(); })
      .def_property_readonly(
          "bytes", [](const BackwardTimes& self) { return self.layout ? self.layout->bytes : std::vector<int64_t>(); })
      .def_property_readonly("busy", [](const BackwardTimes& self) { return busy_time(self); })
      .def_property_readonly("exposed", [](const BackwardTimes& self) { return exposed_times(self); });
}

void bind_status(py::module_& module) {
  py::class_<ReducerStatus>(module, "ReducerStatus")
      .def_readonly("iterations", &ReducerStatus::iterations)
      .def_readonly("buckets_reduced", &ReducerStatus::buckets_reduced)
      .def_readonly("reduced_in_place", &ReducerStatus::reduced_in_place)
      .def_readonly("has_rebuilt_buckets", &ReducerStatus::has_rebuilt_buckets)
      .def_readonly("bucket_indices", &ReducerStatus::bucket_indices)
      .def_readonly("bucket_bytes", &ReducerStatus::bucket_bytes)
      .def_readonly("unused_parameters", &ReducerStatus::unused_parameters)
      .def_readonly("ready_order", &ReducerStatus::ready_order)
      .def_readonly("error", &ReducerStatus::error);
}

void bind_step(ReducerClass& cls) {
  cls.def("prepare_for_forward", &Reducer::prepare_for_forward, NoGil())
      .def("prepare_for_backward", &Reducer::prepare_for_backward, py::arg("outputs"), NoGil())
      .def(
          "_autograd_hook", [](Reducer& self, size_t index) { self.on_gradient(index, {}); }, py::arg("index"), NoGil())
      .def("_prepare_for_accumulation", &Reducer::prepare_for_accumulation, NoGil())
      .def("_close_memory", &Reducer::close_memory, NoGil())
      .def("_set_passes", &Reducer::set_passes, py::arg("passes"), NoGil())
      .def("_has_gradients", &Reducer::has_gradients, NoGil())
      .def("_reduce_missing", &Reducer::reduce_missing, NoGil())
      .def("_delay_all_reduce", &Reducer::delay_all_reduce, NoGil())
      .def("_rebuild_buckets", &Reducer::rebuild_buckets, NoGil())
      .def("_check_reducer_finalized", &Reducer::check_finalized, NoGil())
      .def("_set_manual_finalization_required", &Reducer::set_manual_finalization, py::arg("required"), NoGil())
      .def("_should_finalize_after_backward", &Reducer::should_finalize_after_backward)
      .def("_finalize_backward_manual", &Reducer::finalize_manually, NoGil())
      .def("_reset_state", &Reducer::reset_state, NoGil())
      .def("_remove_autograd_hooks", &Reducer::remove_autograd_hooks, NoGil())
      .def("get_backward_stats", &Reducer::backward_stats, NoGil())
      .def("_get_backward_times", &Reducer::backward_times, NoGil())
      .def("_get_bucket_tuning", &Reducer::tuning, NoGil())
      .def("_get_status", &Reducer::status, NoGil())
      .def("_is_sampled", &Reducer::is_sampled, NoGil())
      .def("_get_phase_times", &Reducer::phase_times, NoGil());
}

void bind_settings(ReducerClass& cls) {
  cls.def("_set_static_graph", &Reducer::set_static_graph, NoGil())
      .def("_static_graph_recorded", &Reducer::static_graph_recorded)
      .def("_ddp_graph_static", &Reducer::graph_is_static)
      .def("_set_weight", &Reducer::set_weight, py::arg("weight"), NoGil())
      .def("_use_weights", &Reducer::use_weights, NoGil())
      .def("_uses_weights", &Reducer::uses_weights)
      .def("_expects_gradients", &Reducer::expects_gradients, NoGil())
      .def("_set_optimizer_in_backward", &Reducer::set_optimizer_in_backward)
      .def("_set_mixed_precision_param_dtype", &Reducer::set_mixed_precision_dtype, py::arg("dtype"), NoGil())
      .def("_set_before_hand_over", &Reducer::set_before_hand_over, py::arg("restore"))
      .def("_set_ddp_runtime_logging_sample_rate", &Reducer::set_sample_rate, py::arg("sample_rate"))
      // torch's class calls these two: its logger is tied to its reducer afterwards, and NCCL needs to know the indices
      // of sparse gradients beforehand.
      .def(
          "set_logger", [](Reducer& /*self*/, const py::object& /*logger*/) {}, py::arg("logger"))
      .def(
          "_set_sparse_metadata", [](Reducer& /*self*/, const py::object& /*indices*/) {}, py::arg("global_unique_ids"))
      .def("_update_process_group", &Reducer::set_process_group, py::arg("new_process_group"), NoGil())
      .def(
          "_install_post_backward_futures",
          [](Reducer& self, const std::vector<std::shared_ptr<PyFuture>>& futures) {
            std::vector<Reducer::FuturePtr> plain;
            for (const auto& future : futures) plain.push_back(future->fut);
            self.install_futures(std::move(plain));
          },
          py::arg("futures"), NoGil());
}

void bind_hooks_and_joining(ReducerClass& cls) {
  cls.def(
         "_register_comm_hook",
         [](Reducer& self, py::object state, py::object hook) {
           auto made = std::make_unique<c10d::PythonCommHook>(std::move(state), std::move(hook));
           const py::gil_scoped_release released;
           self.register_hook(std::move(made));
         },
         py::arg("state"), py::arg("hook"))
      .def(
          "_register_builtin_comm_hook",
          [](Reducer& self, c10d::BuiltinCommHookType type) {
            self.register_hook(make_builtin_hook(type, self.group()));
          },
          py::arg("comm_hook_type"), NoGil())
      .def(
          "_run_comm_hook", [](Reducer& self, c10d::GradBucket& bucket) { return wrap(self.run_hook(bucket)); },
          py::arg("bucket"), NoGil())
      .def(
          "_run_allreduce_hook",
          [](Reducer& self, c10d::GradBucket& bucket) { return wrap(self.run_all_reduce(bucket)); }, py::arg("bucket"),
          NoGil())
      .def("_get_zeros_like_grad_buckets", &Reducer::zero_buckets, NoGil())
      .def("_run_joined_weights", &Reducer::run_joined_weights, NoGil())
      .def("_get_local_used_map", &Reducer::used_map, NoGil())
      .def("_get_unused_map", &Reducer::unused_map, NoGil())
      .def("_push_all_rebuilt_params", &Reducer::push_all_rebuilt_parameters, NoGil())
      .def("_set_joined_division", &Reducer::set_joined_division, py::arg("use_static_world_size"))
      .def("_set_forward_pass_work_handle", &Reducer::set_forward_work, py::arg("work"),
           py::arg("use_static_world_size"), NoGil());
}

void bind_tuning(py::module_& module) {
  py::class_<CommCost>(module, "CommCost", "What a reduction takes: latency_ns, and ns_per_byte for each byte.")
      .def_readonly("latency_ns", &CommCost::latency_ns)
      .def_readonly("ns_per_byte", &CommCost::ns_per_byte)
      .def_readonly("slowdown", &CommCost::slowdown);
  py::class_<BucketTuning>(module, "BucketTuning", "How far the choice of the buckets' size has come.")
      .def_readonly("enabled", &BucketTuning::enabled)
      .def_readonly("cost", &BucketTuning::cost)
      .def_readonly("backwards_left", &BucketTuning::backwards_left)
      .def_property_readonly("cap", [](const BucketTuning& self) { return self.caps.others; })
      .def_property_readonly("first_cap", [](const BucketTuning& self) { return self.caps.first; });
}

void bind_functions(py::module_& module) {
  module.def(
      "assign_parameters",
      [](const std::vector<at::Tensor>& parameters, const std::vector<int64_t>& caps,
         const std::vector<bool>& expect_sparse_gradients) {
        return assign_buckets(gradient_infos(parameters, expect_sparse_gradients), caps, {});
      },
      py::arg("parameters"), py::arg("caps"), py::arg("expect_sparse_gradients"));
  module.def(
      "check_same_model",
      [](const Reducer::GroupPtr& group, const std::vector<at::Tensor>& parameters,
         const std::vector<std::string>& names) { check_same_model(*group, parameters, names); },
      py::arg("group"), py::arg("parameters"), py::arg("names"), NoGil(),
      "Check that all ranks of the group have the same parameters: how many, and each one's dtype, shape and strides.");
}

}  // namespace

void bind_reducer(py::module_& module) {
  // The signatures below use its types.
  py::module_::import("torch.distributed");
  bind_options_struct(module);
  bind_bucket_times(module);
  ReducerClass cls(module, "Reducer", py::dynamic_attr());
  // The GIL is released here and not by a call guard, under which pybind11 would register the new object without it.
  const auto create = [](std::vector<at::Tensor> parameters, Reducer::GroupPtr group, ReducerOptions options) {
    const py::gil_scoped_release released;
    options.is_library_code = is_library_function;
    return ReducerHolder(Reducer::create(std::move(parameters), std::move(group), std::move(options)));
  };
  cls.def(py::init(create), py::arg("parameters"), py::arg("group"), py::arg("options"));
  bind_step(cls);
  bind_settings(cls);
  bind_hooks_and_joining(cls);
  bind_status(module);
  bind_functions(module);
  bind_tuning(module);
}

}  // namespace ours
