"""DistributedDataParallel with this package's reducer in the place of torch's.

The class is a subclass of ``torch.nn.parallel.DistributedDataParallel``, whose forward, buffers, ``join`` and
``no_sync`` it keeps; only what happens to gradients during backward is this package's.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from ourddp import _C, bad_gradients, mixed_precision, optimizer_in_backward, replica_check, tuning, weights
from ourddp.logging_data import ReducerLogger
from ourddp.report import BackwardReport, make_report
from ourddp.sync_batch_norm import SyncBatchNorm

__all__ = ["DistributedDataParallel"]

_TorchDDP = torch.nn.parallel.DistributedDataParallel
# What a module has for the hooks that programs register on it.
_MODULE_HOOKS = frozenset(name for name in vars(torch.nn.Module()) if "_hook" in name)

# torch's class accepts these only with NCCL, but any backend that adds up bfloat16 can run them.
_BF16_HOOKS = ("bf16_compress_hook", "bf16_compress_wrapper_hook")


class DistributedDataParallel(_TorchDDP):
    """Train ``module`` in several processes, each on its share of the data, with equal gradients in all.

    Arguments, methods and attributes are those of ``torch.nn.parallel.DistributedDataParallel``, of which this is
    a subclass; it works over any process group. Over ``ours`` and ``nccl`` gradients are averaged inside the reduction;
    over other backends they are divided on their way into the bucket.

    With ``bucket_cap_mb="auto"`` the bucket size is tuned to the group and the model: the constructor measures what
    reductions cost, and the fourth forward rebuilds the buckets accordingly. With ``find_unused_parameters`` buckets
    are never rebuilt, so the constructor chooses the size right away. ``report`` and the logging data show it.

    With ``bad_gradients`` NaN and infinite values in gradients are looked for, before and after they are reduced. If
    any rank has some, a message names the ranks and the parameters, and all ranks do the same: ``"warn"`` leaves the
    gradients, ``"raise"`` raises a RuntimeError in backward, and ``"skip"`` warns and sets all gradients to None, so
    that the optimizer's step changes nothing. It takes one more reduction, of two numbers, in each backward that
    reduces gradients. ``torch.amp.GradScaler`` skips such steps by itself, and has to see the gradients: it needs
    ``"warn"``.

    With ``check_replicas_every=1000`` every 1000th forward in training begins with ``ourddp.check_replicas``, of
    buffers too if ``broadcast_buffers`` is set; not in ``join()``, where a rank may have run out of input.

    Raises:
        RuntimeError: At construction, if the ranks' models differ; the message names the parameter, both shapes and the
            ranks. In forward, if the last backward left parameters without a gradient; the message names them. In
            backward, if a parameter got its gradient twice.
        ValueError: If an argument does not fit the module.

    """

    # torch's constructor does not set this if the reduction of all parameters is delayed.
    _lazy_init_ran = False

    @functools.wraps(_TorchDDP.__init__)
    def __init__(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        own = {name: kwargs[name] for name in ("bad_gradients", "check_replicas_every") if name in kwargs}
        self.__dict__["_bad_gradients"] = bad_gradients.take(kwargs, module)
        replica_check.check_every(self, kwargs.pop("check_replicas_every", None))
        bound = inspect.signature(_TorchDDP.__init__).bind(self, module, *args, **kwargs)
        given = bound.arguments
        # For change_group(), which gives these another value.
        fixed = ("self", "module", "process_group", "device_mesh", "init_sync")
        self.__dict__["_arguments"] = {**own, **{name: value for name, value in given.items() if name not in fixed}}
        self.__dict__["_tunes_buckets"] = tuning.take_auto(given)
        # Set here, as the constructor of the base class builds the list of parameters that is checked.
        self.__dict__["_model_check_due"] = bool(given.get("init_sync", True))
        precision = given.get("mixed_precision")
        if precision is None or any(parameter.device.type != "cpu" for parameter in module.parameters()):
            super().__init__(*bound.args[1:], **bound.kwargs)
            return
        del given["self"]
        super().__init__(**{**given, "mixed_precision": None})
        mixed_precision.set_up(self, precision)

    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = super().__getstate__()
        if self.mixed_precision is not None:
            mixed_precision.require_copyable(self)
            state["_comm_hooks"] = []  # the copy gets one of its own
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if self.mixed_precision is not None:
            mixed_precision.set_up(self, self.mixed_precision)

    def _build_params_for_reducer(self) -> tuple[list[torch.nn.Parameter], list[bool]]:
        parameters, expect_sparse_gradient = super()._build_params_for_reducer()
        if self.__dict__.pop("_model_check_due", False):
            names = self._build_debug_param_to_name_mapping(parameters)
            _C.check_same_model(self.process_group, parameters, _name_list(names, len(parameters)))
        return parameters, expect_sparse_gradient

    def _ddp_init_helper(
        self,
        parameters: list[torch.nn.Parameter],
        expect_sparse_gradient: list[bool],
        param_to_name_mapping: dict[int, str],
        static_graph: bool,
    ) -> None:
        if self.mixed_precision is not None:
            for index, parameter in enumerate(parameters):
                parameter._idx = index
        options = self._reducer_options(parameters, expect_sparse_gradient, static_graph)
        options.parameter_names = _name_list(param_to_name_mapping, len(parameters))
        self._parameter_names = list(options.parameter_names)
        self.reducer = _C.Reducer(parameters, self.process_group, options)
        self.logger = ReducerLogger(self.reducer, parameters, options, self.process_group)
        self.logger.set_construction_data_and_log(
            type(self.module).__name__,
            self.device_ids or [],
            -1 if self.output_device is None else self.output_device,
            self.broadcast_buffers,
            any(isinstance(module, torch.nn.SyncBatchNorm) for module in self.module.modules()),
            static_graph,
        )
        if options.tune_bucket_size:
            tuning.watch(self)
        self._passing_sync_batchnorm_handle(self.module)

    def _reducer_options(
        self, parameters: list[torch.nn.Parameter], expect_sparse_gradient: list[bool], static_graph: bool
    ) -> _C.ReducerOptions:
        cap = self.bucket_bytes_cap
        first_cap = dist._DEFAULT_FIRST_BUCKET_BYTES if self.bucket_bytes_cap_default else cap
        caps = list(self.bucket_bytes_cap_list)
        options = _C.ReducerOptions()
        options.bucket_bytes_cap_list = caps
        options.tune_bucket_size = self._tunes_buckets and not self._use_python_reducer
        rebuilt = static_graph or not self.find_unused_parameters
        if not caps:
            # Buckets that are rebuilt after the first iteration start out as a single one, because reductions in the
            # order of the parameters could get in the way of other collectives that the model runs in backward.
            caps = [sys.maxsize] if rebuilt else [first_cap, cap]
        if rebuilt or not options.tune_bucket_size:  # otherwise the reducer assigns them, for the size that it chooses
            # The last parameters come first in backward.
            options.bucket_indices = _C.assign_parameters(parameters, caps, expect_sparse_gradient)[::-1]
        options.expect_sparse_gradients = expect_sparse_gradient
        options.bucket_bytes_cap = cap
        options.first_bucket_bytes_cap = first_cap
        options.find_unused_parameters = self.find_unused_parameters
        options.gradient_as_bucket_view = self.gradient_as_bucket_view
        options.skip_all_reduce_unused_params = self.skip_all_reduce_unused_params
        options.batched_grad_copy = getattr(self, "batched_grad_copy", False)
        options.lazy_bucket_allocation = getattr(self, "lazy_bucket_allocation", False)
        options.bad_gradients = self._bad_gradients
        options.attach_to_autograd = not self._use_python_reducer
        return options

    def _setup_in_backward_optimizers(self) -> None:
        if self.device.type != "cpu":
            super()._setup_in_backward_optimizers()
        elif any(hasattr(parameter, "_in_backward_optimizers") for parameter in self._module_parameters):
            optimizer_in_backward.set_up(self)

    @torch._disable_dynamo(recursive=False)
    def _pre_forward(self, *inputs: Any, **kwargs: Any) -> Any:
        reducer = self.__dict__.get("reducer")  # None if the reduction of all parameters is delayed
        if reducer is not None:
            reducer._close_memory()
        given = super()._pre_forward(*inputs, **kwargs)
        replica_check.check_if_due(self)
        return given

    @torch._disable_dynamo(recursive=False)
    def _post_forward(self, output: Any) -> Any:
        output = super()._post_forward(output)
        reducer = self.__dict__.get("reducer")
        if reducer is not None and torch.is_grad_enabled() and not self.require_backward_grad_sync:
            reducer._prepare_for_accumulation()
        return output

    def set_weight(self, weight: float) -> None:
        """Weigh this rank's gradients in the next backward that reduces them.

        ``weight`` is the number of samples or tokens that this rank's loss is a *sum* over, those of all micro-batches
        since the last reduction included. The gradients then are the sum over all ranks divided by the sum of all
        weights: those of one process whose loss is the mean over all samples, however unequal the ranks' shares are. A
        rank without samples has the weight 0, and still runs a backward, for example of ``0 * output.sum()``.

        The weight counts for one reduction, and the last call before it holds. A reduction for which no rank has called
        this is the plain average. If the weights of all ranks are 0, so are the gradients. The first call gives the
        buckets new memory. Inside ``join()`` it has to come before forward; ranks that have run out of input count as
        having the weight 0. Gradients have to be zeroed between reductions with weights: averages that were left from
        the one before would be added up and divided again:

            for tokens, targets in loader:  # targets of padding are -100
                optimizer.zero_grad()
                logits = model(tokens)
                model.set_weight((targets != -100).sum().item())
                cross_entropy(logits, targets, ignore_index=-100, reduction="sum").backward()
                optimizer.step()

        Raises:
            ValueError: If ``weight`` is not an int or a float, negative or not finite; or outside of 2^-32 to 2^63
                and not 0.
            RuntimeError: If gradients are being reduced, or in ways that do not use this package's reducer. In
                backward, on all ranks, if only some have called this; before the first reduction with weights is over,
                it takes the group to notice that, and other backends than ``ours`` may hang or end the process.

        """
        weights.set_weight(self, weight)

    def change_group(self, process_group: dist.ProcessGroup | None = None, *, init_sync: bool = True) -> None:
        """Go on over other ranks: those of another group, or of the same one after ``reconfigure()``.

        It makes anew what depends on the ranks, with the arguments that the constructor got, and forgets a backward
        that has failed. The module, its parameters and communication hooks stay the same; a hook's own state is left
        alone. The other ranks of the group call it too, or make a DistributedDataParallel with the same arguments if
        they are new. All of them get the parameters and buffers of rank 0; ``init_sync=False`` leaves that out, for
        ranks that have the same ones already. The state of an optimizer is not sent: see
        :func:`ourddp.broadcast_optimizer_state`. Zero the gradients afterwards, since some may be averages already.

        ``process_group`` is the default group if it is None.

        Raises:
            RuntimeError: If the ranks' models differ, as at construction. After any error the model can be used again
                only by another ``change_group()``.
            ValueError: If the model has ``mixed_precision``.

        """
        if self.mixed_precision is not None:
            raise ValueError(
                "a DistributedDataParallel with mixed_precision cannot change its group: make a new one of its module"
            )
        module, hooks, training = self.module, self._comm_hooks, self.training
        # Those for forward, backward and state dicts are the program's; the constructor has none.
        module_hooks = {name: own for name, own in vars(self).items() if name in _MODULE_HOOKS}
        built_in = self.__dict__.get("_built_in_hook")
        reducer = self.__dict__.pop("reducer", None)
        if reducer is not None:
            reducer._remove_autograd_hooks()  # something else may still refer to it
        arguments = {**self._arguments, "static_graph": self.static_graph}
        try:
            DistributedDataParallel.__init__(
                self, module, process_group=process_group, init_sync=init_sync, **arguments
            )
        except BaseException:
            self._modules["module"] = module
            self._comm_hooks = hooks
            raise
        finally:
            vars(self).update(module_hooks)
        self.training = training
        if built_in is not None:
            self._register_builtin_comm_hook(built_in)
        if not self._comm_hooks:  # an optimizer in backward has registered its own
            for hook, state in hooks:
                self.register_comm_hook(state, hook)

    def report(self) -> BackwardReport:
        """Return when each bucket of the last backward was ready and reduced, and how long backward waited for it.

        ``print(model.report())`` shows a table. It covers this rank alone and costs no communication. Before the first
        backward that reduces gradients it is empty; a backward in ``no_sync()`` leaves it as it is. The main numbers
        are in the logging data too, in nanoseconds: ``backward_comm_exposed_time``, ``backward_comm_busy_time``,
        ``bucket_comm_times`` and ``bucket_comm_exposed_times``. With ``bucket_cap_mb="auto"`` both also tell the size
        of the buckets and the measurements behind it: ``bucket_cap_bytes``, ``comm_latency_time`` (nanoseconds),
        ``comm_bytes_per_second`` and ``comm_slowdown_percent``.
        """
        group = self.process_group
        return make_report(
            self.reducer._get_backward_times(),
            self.reducer._get_bucket_tuning(),
            self._parameter_names,
            rank=group.rank(),
            world_size=group.size(),
            backend=_backend_name(group, self.device),
        )

    @property
    def _static_graph_delay_allreduce_enqueued(self) -> bool:
        # Ask the reducer: a backward without a reduction (in no_sync(), for example) records nothing, whatever torch
        # sets.
        return self.reducer._static_graph_recorded()

    @_static_graph_delay_allreduce_enqueued.setter
    def _static_graph_delay_allreduce_enqueued(self, value: bool) -> None:
        """Ignore what torch's class assigns."""

    def _passing_sync_batchnorm_handle(self, module: torch.nn.Module) -> None:
        # torch's class refuses all such layers on the CPU, as its own cannot run there; this package's can.
        layers = (layer for layer in module.modules() if isinstance(layer, torch.nn.SyncBatchNorm))
        if self.device_type == "cpu" and not all(isinstance(layer, SyncBatchNorm) for layer in layers):
            self._log_and_throw(
                ValueError,
                "torch's SyncBatchNorm layers only work with GPU modules. Those of this package work on the CPU too: "
                "convert the module with ourddp.SyncBatchNorm.convert_sync_batchnorm(module).",
            )

    def _check_comm_hook(self, hook: Callable) -> None:
        if getattr(hook, "__name__", "") not in _BF16_HOOKS and not _has_right_annotations(hook):
            super()._check_comm_hook(hook)  # says what is wrong

    def register_comm_hook(self, state: object, hook: Callable) -> None:
        """Let ``hook(state, bucket)`` reduce the gradients; see torch's class for what it must return.

        ``hook`` may be any callable with a parameter ``bucket``: a function, a ``functools.partial``, an object. If it
        is registered between forward and backward, it reduces the gradients of that backward too. A hook that is
        refused leaves the model as it was.

        Raises:
            TypeError: If ``hook`` is not callable.
            ValueError: If its annotations are not those of a communication hook.
            RuntimeError: If a hook has been registered before, or gradients are being reduced.

        """
        self._check_comm_hook(hook)
        self.reducer._register_comm_hook(state, hook)
        self.logger._set_comm_hook_name(_hook_name(hook))
        self._comm_hooks.append((hook, state))

    def _register_builtin_comm_hook(self, comm_hook_type: dist.BuiltinCommHookType) -> None:
        """Let a hook written in C++ reduce the gradients.

        Raises:
            RuntimeError: If a hook has been registered before, or gradients are being reduced.

        """
        self.reducer._register_builtin_comm_hook(comm_hook_type)
        self._built_in_hook = comm_hook_type
        self.logger._set_comm_hook_name(str(comm_hook_type))

    def _match_unused_params_allreduce(self) -> None:
        self.process_group.allreduce(self.reducer._get_unused_map())

    def _match_all_reduce_for_bwd_pass(self) -> None:
        self.reducer._run_joined_weights()
        super()._match_all_reduce_for_bwd_pass()

    def _check_global_requires_backward_grad_sync(self, is_joined_rank: bool) -> bool | None:
        return weights.requires_gradient_sync(self, is_joined_rank)

    def join_hook(self, **kwargs: Any) -> Any:
        """Return the hook that shadows this module's collectives once the rank has run out of input."""
        self.reducer._set_joined_division(kwargs.get("divide_by_initial_world_size", True))
        return super().join_hook(**kwargs)


def _has_right_annotations(hook: Callable) -> bool:
    """Return whether the hook's annotations, which may be strings, are those of a communication hook, or absent."""
    try:
        signature = inspect.signature(hook, eval_str=True)
        bucket = signature.parameters["bucket"].annotation
    except (TypeError, ValueError, NameError, AttributeError, KeyError):
        return False
    future = torch.futures.Future[torch.Tensor]
    return bucket in (inspect.Parameter.empty, dist.GradBucket) and (
        signature.return_annotation in (inspect.Signature.empty, future)
    )


def _hook_name(hook: Callable) -> str:
    """Return the name of the function that ``hook`` calls in the end, or of its class."""
    while isinstance(hook, functools.partial):
        hook = hook.func
    return getattr(hook, "__qualname__", type(hook).__qualname__)


def _name_list(names: dict[int, str], count: int) -> list[str]:
    """Return the parameters' names in order; a parameter of the outermost module has no leading dot."""
    return [names.get(index, "").removeprefix(".") for index in range(count)]


def _backend_name(group: dist.ProcessGroup, device: torch.device) -> str:
    """Return the name of the backend that serves ``device``; a group written in Python has none and is asked itself."""
    try:
        return group._get_backend(device).name()
    except RuntimeError:
        return group.name()
