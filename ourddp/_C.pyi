"""The C++ core: the options, the c10d backend, and the reducer behind DistributedDataParallel."""

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

from torch import Tensor, dtype
from torch._C._distributed_c10d import (
    Backend,
    BuiltinCommHookType,
    GradBucket,
    ProcessGroup,
    Store,
    Work,
)
from torch.futures import Future

# --- launchers (csrc/python/bind_launch.cpp) --------------------------------------------------------------------------

def find_launch(lookup: Callable[[str], str]) -> dict[str, Any]:
    """Return the fields of :class:`ourddp.Launch`. ``lookup`` returns a variable, or an empty string.

    Raises ValueError if the variables are incomplete or contradict each other.
    """

# --- network and node (csrc/python/bind_network.cpp) ------------------------------------------------------------------

def interfaces() -> list[tuple[str, str, bool]]:
    """Return name, address and whether it is loopback, for each address of the interfaces that are up."""

def own_addresses(master: str) -> list[str]:
    """Return the addresses at which ranks of other nodes would reach this process, as OURS_INTERFACE says.

    Without that option they are those towards ``master``, a name or an address. Raises ValueError if OURS_INTERFACE
    matches no address, and RuntimeError if there is no route to the master.
    """

def near_congestion_control(asked: str, usual: str, allowed: str) -> str:
    """Return the congestion control of connections to near peers; empty: the system's, ``usual``.

    ``asked`` is the value of OURS_TCP_CONGESTION, and ``allowed`` has names with spaces between them.
    """

def memory_left() -> int | None:
    """Return the bytes that this process may still take before the machine or a control group runs out of memory."""

class NodeProbe:
    """A little memory of this process, by which others find out whether they share memory with it."""

    def __init__(self) -> None:
        """Raise RuntimeError if no memory can be had."""

    def address(self) -> str:
        """Return where others find the memory."""

    @staticmethod
    def obstacle(address: str) -> str:
        """Return why this process does not share memory with the one that has this address; empty if it does."""

# --- options (csrc/python/bind_options.cpp) --------------------------------------------------------------------------

def option_table() -> list[dict[str, str]]:
    """Return one row for each environment variable: ``name``, ``default``, ``accepted``, ``help``."""

def option_values() -> dict[str, str]:
    """Return the options in force, by variable. Raises ValueError if a value in the environment is not accepted."""

def parse_options(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the options that ``environment`` would give, by variable. Raises ValueError as option_values()."""

# --- table of algorithms (csrc/python/bind_select.cpp) ----------------------------------------------------------------

def selection_table(option: str) -> str:
    """Return the table that a value of OURS_SELECT gives, a rule a line. Raises ValueError if it is not understood."""

def choose_algorithm(operation: str, nodes: int, local: int, bytes: int, option: str = "") -> str:
    """Return the algorithm for an array of so many bytes over so many nodes, of which the largest has ``local`` ranks.

    ``option`` is a value of OURS_SELECT. Raises ValueError if it, or the operation, is not understood.
    """

# --- backend (csrc/python/bind_backend.cpp) --------------------------------------------------------------------------

class MisuseError(ValueError, RuntimeError):
    """An invalid call. Other backends raise ValueError for some of these, and RuntimeError for others."""

class OrderedFuture(Future[Any]):
    """The future of a collective. Collectives of its callbacks are matched by the order of attachment."""

class CollectiveWork(Work):
    """One collective."""

class CoalescedWork(Work):
    """Several operations that are waited for as one."""

class DeviceTransferWork(Work):
    """A send or a receive of a device's tensor."""

class ProcessGroupOurs(Backend):
    """The c10d backend "ours": collectives and messages of tensors on the CPU and one device."""

    class Options(Backend.Options):
        """What a group is made with. ``timeout``: how long its operations may take."""

        selection: str
        """Rules of the table of algorithms for this group alone; empty: those of OURS_SELECT."""

        def __init__(self, timeout: timedelta = ...) -> None: ...

    def failure(self) -> str:
        """Return the message of the failure that ended the group, or an empty string."""

    def heard_stop(self) -> bool:
        """Return whether a rank had been asked to stop before one of the all-reduces and barriers called so far.

        The same on all ranks at the same place of their programs. Waits for those that are under way.
        """

    def node_sizes(self) -> list[int]:
        """Return how many ranks each node has."""

    def perform_nocolor_split(self, device: object) -> None:
        """Do nothing: what new_group() of a bound group calls on the ranks that are not in the new one."""

    def tally(self, recent: bool) -> dict[str, Any]:
        """Return what the group's collectives have cost this rank in the last 30 to 60 seconds, or since the first one.

        Microseconds ``elapsed`` and ``blocked``; ``calls`` and ``bytes``; and lists by rank, ``late`` (microseconds)
        and ``last`` (calls). Beside these, since the first one, how many calls were ``begun`` and have
        ``ended``.
        """

    def device_engine(self) -> str:
        """Return what moves the data of tensors on this rank's device, and why; empty until it was first needed."""

def choose_rails(nodes: int, local: int, bytes: int, ring: bool = False) -> tuple[int, int]:
    """Return how many rails an array takes between nodes of ``local`` ranks, and in how many chunks."""

def begin_sharing_tensors(backend: ProcessGroupOurs, least: int) -> None:
    """Give the CPU tensors of at least so many bytes that this thread makes memory of the group's heap."""

def end_sharing_tensors() -> None:
    """End what this thread has begun last."""

def request_stop() -> None:
    """Note that somebody has asked this process to stop."""

def stop_requested() -> bool:
    """Return whether somebody has asked this process to stop."""

def forget_stop_request() -> None:
    """Forget that somebody has asked: a forked child does, since its parent was asked."""

def records_flights() -> bool:
    """Return whether the backend writes into PyTorch's FlightRecorder itself, and needs no hooks for it."""

def create_backend(dist_options: Any, backend_options: object | None = None) -> ProcessGroupOurs:
    """Make the backend of one process group, for ``Backend.register_backend(..., extended_api=True)``.

    Blocks until all ranks have come. Raises DistBackendError if they cannot come together within the timeout.
    """

# --- engines (csrc/python/bind_engines.cpp) --------------------------------------------------------------------------

def set_backend_maker(
    obstacle: Callable[[str], str],
    make: Callable[[str, Store, int, int, timedelta, str], Backend],
) -> None:
    """Set how the backend that ``OURS_INTERNODE`` names is made.

    ``obstacle(name)`` returns why it cannot be, or an empty string; ``make(name, store, rank, size, timeout, address)``
    returns it.
    """

# --- devices (csrc/python/bind_devices.cpp) --------------------------------------------------------------------------

def device_facts(device_type: str) -> dict[str, Any]:
    """Return what there is for devices of a type such as ``cuda``.

    Texts ``obstacle`` (why there is no library for them, or empty), ``library``, ``vendor_version`` and
    ``vendor_obstacle`` (of the vendor's library for collectives), the list ``devices``, of names, and the text
    ``device_obstacle`` (why nobody can tell which devices there are, or empty).
    """

def use_device_library(device_type: str, path: str) -> None:
    """Let the library at ``path`` serve devices of that type. For tests, which have devices of their own."""

# --- timeline (csrc/python/bind_timeline.cpp) -------------------------------------------------------------------------

def start_timeline(path: str, rank: int, offset_ns: int) -> None:
    """Record what this process does into an existing file. Raises ValueError if one is being recorded already."""

def stop_timeline() -> None:
    """Write the rest, and stop."""

def timeline_is_on() -> bool:
    """Return whether a timeline is being recorded."""

# --- reducer (csrc/python/bind_reducer.cpp) --------------------------------------------------------------------------

class ReducerOptions:
    """How a Reducer works; sequences run parallel to the parameters, sizes are in bytes."""

    bucket_indices: Sequence[Sequence[int]]
    expect_sparse_gradients: Sequence[bool]
    parameter_names: Sequence[str]
    bucket_bytes_cap: int
    first_bucket_bytes_cap: int
    bucket_bytes_cap_list: Sequence[int]
    tune_bucket_size: bool
    find_unused_parameters: bool
    gradient_as_bucket_view: bool
    skip_all_reduce_unused_params: bool
    batched_grad_copy: bool
    bad_gradients: str
    """What to do about NaN and infinite values: "warn", "raise" or "skip"; empty: they are not looked for."""
    lazy_bucket_allocation: bool
    attach_to_autograd: bool

    def __init__(self) -> None: ...

class BucketTimes:
    """When things happened to a bucket in one backward, in nanoseconds of the steady clock; -1: did not happen."""

    @property
    def launched(self) -> int: ...
    @property
    def first_gradient(self) -> int: ...
    @property
    def last_gradient(self) -> int: ...
    @property
    def reduction_began(self) -> int: ...
    @property
    def reduction_ended(self) -> int: ...
    @property
    def end_is_exact(self) -> bool: ...

class BackwardTimes:
    """When things happened in one backward, in nanoseconds of the steady clock; iteration 0: there was none yet.

    ``parameters`` (indices), ``bytes``, ``buckets`` and ``exposed`` (durations) have one entry a bucket.
    """

    @property
    def iteration(self) -> int: ...
    @property
    def began(self) -> int: ...
    @property
    def compute_ended(self) -> int: ...
    @property
    def ended(self) -> int: ...
    @property
    def parameters(self) -> list[list[int]]: ...
    @property
    def bytes(self) -> list[int]: ...
    @property
    def buckets(self) -> list[BucketTimes]: ...
    @property
    def busy(self) -> int: ...
    @property
    def exposed(self) -> list[int]: ...

class ReducerStatus:
    @property
    def iterations(self) -> int: ...
    @property
    def buckets_reduced(self) -> int: ...
    @property
    def reduced_in_place(self) -> int: ...
    @property
    def has_rebuilt_buckets(self) -> bool: ...
    @property
    def bucket_indices(self) -> list[list[int]]: ...
    @property
    def bucket_bytes(self) -> list[int]: ...
    @property
    def unused_parameters(self) -> list[int]: ...
    @property
    def ready_order(self) -> list[int]: ...
    @property
    def error(self) -> str: ...

class Reducer:
    """Averages gradients over a process group while backward is still running."""

    def __init__(self, parameters: Sequence[Tensor], group: ProcessGroup, options: ReducerOptions) -> None: ...
    def prepare_for_forward(self) -> None: ...
    def prepare_for_backward(self, outputs: Sequence[Tensor]) -> None: ...
    def get_backward_stats(self) -> list[int]: ...
    def _autograd_hook(self, index: int) -> None: ...
    def _set_passes(self, passes: int) -> None: ...
    def _has_gradients(self) -> bool: ...
    def _reduce_missing(self) -> None: ...
    def _delay_all_reduce(self) -> None: ...
    def _rebuild_buckets(self) -> bool: ...
    def _check_reducer_finalized(self) -> None: ...
    def _set_manual_finalization_required(self, required: bool) -> None: ...
    def _should_finalize_after_backward(self) -> bool: ...
    def _finalize_backward_manual(self) -> None: ...
    def _reset_state(self) -> None: ...
    def _remove_autograd_hooks(self) -> None: ...
    def _get_backward_times(self) -> BackwardTimes: ...
    def _get_bucket_tuning(self) -> BucketTuning: ...
    def _get_status(self) -> ReducerStatus: ...
    def _is_sampled(self) -> bool: ...
    def _get_phase_times(self) -> dict[str, int]: ...
    def _prepare_for_accumulation(self) -> None: ...
    def _close_memory(self) -> None: ...
    def _set_static_graph(self) -> None: ...
    def _static_graph_recorded(self) -> bool: ...
    def _ddp_graph_static(self) -> bool: ...
    def _set_weight(self, weight: float) -> None: ...
    def _use_weights(self) -> None: ...
    def _uses_weights(self) -> bool: ...
    def _expects_gradients(self) -> bool: ...
    def _set_optimizer_in_backward(self) -> None: ...
    def _set_mixed_precision_param_dtype(self, dtype: dtype) -> None: ...
    def _set_before_hand_over(self, restore: Callable[[], None]) -> None: ...
    def _set_ddp_runtime_logging_sample_rate(self, sample_rate: int) -> None: ...
    def set_logger(self, logger: object) -> None:
        """Do nothing: a logger is made with its reducer."""

    def _set_sparse_metadata(self, global_unique_ids: Mapping[str, Tensor]) -> None:
        """Do nothing: sparse gradients are added up whatever their indices are."""

    def _update_process_group(self, new_process_group: ProcessGroup) -> None: ...
    def _install_post_backward_futures(self, futures: Sequence[Future[Any]]) -> None: ...
    def _register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None: ...
    def _register_builtin_comm_hook(self, comm_hook_type: BuiltinCommHookType) -> None: ...
    def _run_comm_hook(self, bucket: GradBucket) -> Future[Any]: ...
    def _run_allreduce_hook(self, bucket: GradBucket) -> Future[Any]: ...
    def _get_zeros_like_grad_buckets(self) -> list[GradBucket]: ...
    def _run_joined_weights(self) -> None: ...
    def _get_local_used_map(self) -> Tensor: ...
    def _get_unused_map(self) -> Tensor: ...
    def _push_all_rebuilt_params(self) -> None: ...
    def _set_joined_division(self, use_static_world_size: bool) -> None: ...
    def _set_forward_pass_work_handle(self, work: Work, use_static_world_size: bool) -> None: ...

def assign_parameters(
    parameters: Sequence[Tensor], caps: Sequence[int], expect_sparse_gradients: Sequence[bool]
) -> list[list[int]]:
    """Return which parameters share a bucket."""

def check_same_model(group: ProcessGroup, parameters: Sequence[Tensor], names: Sequence[str]) -> None:
    """Check that all ranks of ``group`` have the same parameters: how many, and each one's dtype, shape and strides.

    ``names`` run parallel to ``parameters`` and may differ. Raises RuntimeError, which names the first parameter that
    differs, both shapes, and the ranks.
    """

class CommCost:
    """What a reduction takes: ``latency_ns`` nanoseconds, and ``ns_per_byte`` for each byte.

    ``slowdown`` is the share of it, 0 to 1, by which a computation that goes on meanwhile takes longer.
    """

    @property
    def latency_ns(self) -> float: ...
    @property
    def ns_per_byte(self) -> float: ...
    @property
    def slowdown(self) -> float: ...

class BucketTuning:
    """How far the choice of the buckets' size has come; caps are in bytes, 0 until they are chosen."""

    @property
    def enabled(self) -> bool: ...
    @property
    def cost(self) -> CommCost: ...
    @property
    def backwards_left(self) -> int: ...
    @property
    def cap(self) -> int: ...
    @property
    def first_cap(self) -> int: ...
