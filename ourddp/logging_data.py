"""The logging data of a DistributedDataParallel: the figures that torch's class logs, under its keys.

They are those of this rank. Times are in nanoseconds.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import DDPLoggingData

from ourddp import _C

__all__ = ["ReducerLogger"]

_VARIABLES = (
    "MASTER_ADDR",
    "MASTER_PORT",
    "CUDA_VISIBLE_DEVICES",
    "TORCH_DISTRIBUTED_DEBUG",
    "GLOO_SOCKET_IFNAME",
    "GLOO_DEVICE_TRANSPORT",
)
_NCCL_VARIABLES = ("NCCL_SOCKET_IFNAME", "NCCL_DEBUG", "NCCL_NTHREADS", "NCCL_IB_TIMEOUT")

_TYPE_NAMES = {
    torch.float16: "c10::Half",
    torch.bfloat16: "c10::BFloat16",
    torch.float32: "float",
    torch.float64: "double",
    torch.complex32: "c10::complex<c10::Half>",
    torch.complex64: "c10::complex<float>",
    torch.complex128: "c10::complex<double>",
}


class ReducerLogger:
    """Collects the data. It has the methods of torch's logger, which torch's class calls."""

    def __init__(
        self,
        reducer: _C.Reducer,
        parameters: Sequence[torch.Tensor],
        options: _C.ReducerOptions,
        group: dist.ProcessGroup,
    ) -> None:
        self._reducer = reducer
        self._finds_unused = options.find_unused_parameters
        self._parameter_bytes = [parameter.nbytes for parameter in parameters]
        self._samples = 0
        devices = {parameter.device for parameter in parameters}
        self._data: dict[str, str | int] = {
            "dtypes": _joined(sorted({_TYPE_NAMES.get(p.dtype, str(p.dtype)) for p in parameters})),
            "bucket_sizes": _joined(reducer._get_status().bucket_bytes),
            "backend_name": group.name(),
            "world_size": group.size(),
            "rank": group.rank(),
            "iteration": 0,
            "num_parameter_tensors": len(parameters),
            "total_parameter_size_bytes": sum(self._parameter_bytes),
            "is_multi_device_module": int(len(devices) > 1),
            "bucket_cap_bytes": options.bucket_bytes_cap,
            "find_unused_parameters": int(options.find_unused_parameters),
            "gradient_as_bucket_view": int(options.gradient_as_bucket_view),
            **_environment(group.name()),
        }
        if group.name() == "gloo":
            backend_options = getattr(group._get_backend(parameters[0].device), "options", None)
            self._data["gloo_num_threads"] = getattr(backend_options, "_threads", 2)

    def set_construction_data_and_log(
        self,
        module_name: str,
        device_ids: Sequence[int],
        output_device: int,
        broadcast_buffers: bool,
        has_sync_bn: bool,
        static_graph: bool,
    ) -> None:
        """Note what the model was constructed with."""
        self._data |= {
            "module_name": module_name,
            "device_ids": _joined(device_ids),
            "output_device": output_device,
            "broadcast_buffers": int(broadcast_buffers),
            "has_sync_bn": int(has_sync_bn),
        }
        if static_graph:
            self._set_static_graph()

    def set_runtime_stats_and_log(self) -> None:
        """Note the times of the last step, if it was sampled; to be called before each forward."""
        if self._reducer._is_sampled():
            self._note_step()

    @torch._disable_dynamo
    def _note_step(self) -> None:
        status = self._reducer._get_status()
        self._samples += 1
        self._data |= {
            "iteration": status.iterations,
            "num_buckets_reduced": status.buckets_reduced,
            "num_gradients_reduced_in_place": status.reduced_in_place,
            "has_rebuilt_buckets": int(status.has_rebuilt_buckets),
            "unused_parameter_size": sum(self._parameter_bytes[index] for index in status.unused_parameters),
            "prev_iteration_grad_ready_order_indices": _joined(status.ready_order),
        }
        if status.has_rebuilt_buckets:
            self._data["rebuilt_bucket_sizes"] = _joined(status.bucket_bytes)
            buckets = (" ".join(map(str, bucket)) for bucket in status.bucket_indices)
            self._data["rebuilt_per_bucket_param_indices"] = _joined(buckets)
        durations = {}
        for name, time in self._reducer._get_phase_times().items():
            (durations if name.endswith("_time") else self._data)[name] = time
        self._note_communication()
        if "backward_comm_exposed_time" in self._data:
            durations["backward_comm_exposed_time"] = self._data["backward_comm_exposed_time"]
        for name, time in durations.items():
            average = self._data.get(f"avg_{name}", 0)
            self._data |= {name: time, f"avg_{name}": (average * (self._samples - 1) + time) // self._samples}

    def _note_communication(self) -> None:
        times = self._reducer._get_backward_times()
        if times.iteration > 0:
            exposed = times.exposed
            self._data |= {
                "backward_comm_exposed_time": sum(exposed),
                "backward_comm_busy_time": times.busy,
                "bucket_comm_times": _joined(b.reduction_ended - b.reduction_began for b in times.buckets),
                "bucket_comm_exposed_times": _joined(exposed),
            }
        tuning = self._reducer._get_bucket_tuning()
        if not tuning.enabled:
            return
        cost = tuning.cost
        self._data |= {
            "bucket_cap_auto": 1,
            "comm_latency_time": round(cost.latency_ns),
            # Zero if the reductions that were measured took no longer for more bytes.
            "comm_bytes_per_second": round(1e9 / cost.ns_per_byte) if cost.ns_per_byte > 0 else 0,
            "comm_slowdown_percent": round(100 * cost.slowdown),
        }
        if tuning.cap > 0:
            self._data["bucket_cap_bytes"] = tuning.cap

    def set_error_and_log(self, error: str) -> None:
        """Note an error."""
        self._data |= {"has_error": 1, "error": error, "iteration": self._reducer._get_status().iterations}

    def _set_comm_hook_name(self, comm_hook: str) -> None:
        self._data["comm_hook"] = comm_hook

    def _set_static_graph(self) -> None:
        self._data["static_graph"] = 1

    def _set_uneven_input_join(self) -> None:
        self._data["join_uneven_inputs"] = 1

    def _get_ddp_logging_data(self) -> DDPLoggingData:
        error = self._reducer._get_status().error
        if error:
            self.set_error_and_log(error)
        self._note_communication()
        if self._finds_unused:
            self._data["can_set_static_graph"] = int(self._reducer._ddp_graph_static())
        data = DDPLoggingData()
        data.strs_map = {name: value for name, value in self._data.items() if isinstance(value, str)}
        data.ints_map = {name: value for name, value in self._data.items() if isinstance(value, int)}
        return data


def _joined(values: Iterable[object]) -> str:
    return ", ".join(map(str, values))


def _environment(backend_name: str) -> dict[str, str]:
    """Return the environment variables that are logged, by lower-case name."""
    names = _VARIABLES + (_NCCL_VARIABLES if backend_name == "nccl" else ())
    return {name.lower(): os.environ.get(name, "N/A") for name in names}
