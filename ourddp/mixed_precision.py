"""DDP's native mixed precision for CPU modules; torch's own way needs an accelerator's streams.

Parameters have low precision from forward until a backward that reduces gradients has computed all of them, or until
either fails. At all other times they have full precision.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel.distributed import _find_tensors

__all__ = ["require_copyable", "set_up"]


def set_up(model: Any, config: Any) -> None:
    """Set ``model``, a new DistributedDataParallel or a copy, up for ``config``, torch's ``_MixedPrecision``."""
    model.mixed_precision = config
    if config.buffer_dtype is not None:
        for buffer in model.module.buffers():
            if buffer.is_floating_point() and not getattr(buffer, "_ddp_ignored", False):
                buffer.data = buffer.to(config.buffer_dtype)
    if config.param_dtype is not None:
        reduced, _ = model._build_params_for_reducer()
        for parameter in _parameters(model):
            parameter._ddp_precision = _Precision()
            # By the names that torch gives them.
            parameter._fp_param = parameter.data
            parameter._mp_param = parameter.data.new_empty(0, dtype=config.param_dtype)
        for index, parameter in enumerate(reduced):
            parameter._ddp_precision.index = index
        for module in (model, model.module):
            _drop_hooks(module)
        watch = _Watch(model)
        model.module.register_forward_pre_hook(functools.partial(_before_forward, watch))
        model.module.register_forward_hook(functools.partial(_after_forward, watch))
        model.register_forward_hook(functools.partial(_after_attempt, watch), always_call=True)
        model.reducer._set_mixed_precision_param_dtype(config.param_dtype)
        model.reducer._set_before_hand_over(functools.partial(_restore, watch.model))
    model.register_comm_hook(weakref.ref(model), reduce_in_mixed_precision)


def require_copyable(model: Any) -> None:
    """Check that ``model``, which has mixed precision, can be copied.

    Raises:
        RuntimeError: If it is not on the CPU, or its parameters have low precision, which they have from forward to the
            end of its backward.

    """
    if model.device_type != "cpu":
        raise RuntimeError(
            "A DistributedDataParallel with mixed_precision can be pickled and copied only if it is on the CPU. "
            "Save its state_dict(), or copy the module that it wraps."
        )
    if any(_is_low(parameter) for parameter in _parameters(model)):
        raise RuntimeError(
            "A DistributedDataParallel with mixed_precision cannot be pickled or copied between forward and the end of "
            "backward, while its parameters have low precision. Do so after backward."
        )


def reduce_in_mixed_precision(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average the bucket in the precision asked for; ``state`` is a weak reference to the model."""
    model = state()
    dtype = model.mixed_precision.reduce_dtype or model.mixed_precision.param_dtype
    if dtype is not None:
        bucket.set_buffer(bucket.buffer().to(dtype))
    world_size = model.process_group.size()

    def average(done: torch.futures.Future[Any]) -> torch.Tensor:
        done.value()  # raises if the reduction failed
        return bucket.buffer().div_(world_size)

    return model.reducer._run_allreduce_hook(bucket).then(average)


class _Precision:
    """The precision that a parameter has at present. A copy of the parameter gets a new record."""

    def __init__(self) -> None:
        self.index = -1  # among the reducer's parameters
        self.is_low = False
        self.hook: tuple[Any, Any] | None = None  # the accumulator that awaits a gradient of low precision, its hook
        self.gradient: tuple[torch.Tensor, torch.Tensor, int] | None = None  # see _lower_gradient

    def __reduce__(self) -> tuple[type[_Precision], tuple[()]]:
        return _Precision, ()


class _Watch:
    """Restores the parameters if forward or backward fails; at the end of other backwards the reducer does it.

    A copy has no model, and the hooks that were copied with it do nothing.
    """

    def __init__(self, model: Any = None) -> None:
        self.model: Callable[[], Any] = weakref.ref(model) if model is not None else lambda: None
        self.lowered = False  # by the forward that is under way, and not by an earlier one that awaits its backward
        self._task = -1

    def __reduce__(self) -> tuple[type[_Watch], tuple[()]]:
        return _Watch, ()

    def begin_backward(self, *_: object) -> None:
        """Watch the running backward. A nested one, as that of a reentrant checkpoint, is watched by itself."""
        task = torch._C._current_graph_task_id()
        if task != self._task:
            self._task = task
            torch.autograd.Variable._execution_engine.queue_callback(_End(self.model))


class _End:
    """A callback for the end of backward. If backward fails, autograd drops it without calling it."""

    def __init__(self, model: Callable[[], Any]) -> None:
        self._model = model
        self._reached = False

    def __call__(self) -> None:
        self._reached = True

    def __del__(self) -> None:
        if not self._reached:
            _restore(self._model)


def _parameters(model: Any) -> Iterator[torch.nn.Parameter]:
    """Return the parameters that change their precision, those without a gradient included."""
    return (p for p in model.module.parameters() if not getattr(p, "_ddp_ignored", False))


def _drop_hooks(module: torch.nn.Module) -> None:
    """Remove the hooks that were copied with a module."""
    for hooks in (module._forward_pre_hooks, module._forward_hooks):
        for key, hook in list(hooks.items()):
            if isinstance(hook, functools.partial) and hook.func in (_before_forward, _after_forward, _after_attempt):
                del hooks[key]
                module._forward_hooks_always_called.pop(key, None)


def _is_low(parameter: Any) -> bool:
    return hasattr(parameter, "_ddp_precision") and parameter._ddp_precision.is_low


def _before_forward(watch: _Watch, module: torch.nn.Module, *_: object) -> None:
    model = watch.model()
    if model is None or module is not model.module:
        return  # the hook was copied with the module
    for parameter in _parameters(model):
        # It is low already if an earlier forward still awaits its backward.
        if not _is_low(parameter):
            _lower(parameter)
            watch.lowered = True
        if not torch.is_grad_enabled():
            continue
        if parameter.grad is not None and parameter.grad.dtype != parameter.dtype:
            _lower_gradient(parameter)
        # The reducer's hooks are on the full-precision accumulators, which autograd uses if both precisions are equal.
        has_two = parameter._fp_param.dtype != parameter.dtype
        if parameter.requires_grad and has_two and not _awaits_gradient(parameter):
            accumulator = parameter.expand_as(parameter).grad_fn.next_functions[0][0]
            hook = functools.partial(_on_gradient, watch, parameter._ddp_precision.index)
            parameter._ddp_precision.hook = (accumulator, accumulator.register_hook(hook))


def _lower(parameter: Any) -> None:
    parameter._fp_param = parameter.data
    parameter._mp_param = parameter.data = parameter.data.to(parameter._mp_param.dtype)
    parameter._ddp_precision.is_low = True


def _lower_gradient(parameter: Any) -> None:
    """Lower the gradient's precision so that autograd can add to it; keep the original in case nothing is added."""
    gradient, full = parameter.grad, parameter.grad.data
    gradient.data = full.to(parameter.dtype)
    parameter._ddp_precision.gradient = (gradient, full, gradient._version)


def _raise_gradient(parameter: Any) -> None:
    gradient, full, version = parameter._ddp_precision.gradient or (None, None, 0)
    parameter._ddp_precision.gradient = None
    if parameter.grad is None:
        return
    if parameter.grad is gradient and gradient._version == version and full is not None:
        gradient.data = full
    else:
        parameter.grad.data = parameter.grad.to(parameter.dtype)


def _awaits_gradient(parameter: Any) -> bool:
    return parameter._ddp_precision.hook is not None


def _on_gradient(watch: _Watch, index: int, *_: object) -> None:
    watch.begin_backward()
    watch.model().reducer._autograd_hook(index)


def _after_forward(watch: _Watch, module: torch.nn.Module, _: object, output: object) -> None:
    model = watch.model()
    if model is None or module is not model.module:
        return
    if torch.is_grad_enabled():
        for tensor in _find_tensors(output):
            if tensor.grad_fn is not None:
                tensor.register_hook(watch.begin_backward)
    elif not any(_awaits_gradient(parameter) for parameter in _parameters(model)):
        _restore(watch.model)  # no backward will do it


def _after_attempt(watch: _Watch, _model: torch.nn.Module, _inputs: object, output: object) -> None:
    lowered, watch.lowered = watch.lowered, False
    # If forward failed, its exception is being handled now.
    if lowered and output is None and sys.exc_info()[0] is not None:
        _restore(watch.model)


def _restore(reference: Callable[[], Any]) -> None:
    """Give the model's parameters and gradients full precision, before averages are written into the gradients."""
    model = reference()
    for parameter in () if model is None else _parameters(model):
        if not _is_low(parameter):
            continue
        precision = parameter._ddp_precision
        parameter.data = parameter._fp_param
        parameter._mp_param = parameter._mp_param.new_empty(0)
        precision.is_low = False
        _raise_gradient(parameter)
        if precision.hook is not None:
            precision.hook[1].remove()
            precision.hook = None
