"""Read "cuda:N" as the CPU, so that tests which merely name a GPU can run without one.

Only names are translated: every place where the suite passes a device (an int, "cuda", ``torch.device("cuda:1")``) to
torch gets the CPU instead, streams and events become objects without effect, and DDP is built as for a CPU module. No
result is altered.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

# fmt: off
_FACTORIES = (
    "arange", "as_tensor", "asarray", "empty", "empty_like", "empty_strided", "eye", "full", "full_like",
    "linspace", "logspace", "ones", "ones_like", "rand", "rand_like", "randint", "randint_like", "randn",
    "randn_like", "randperm", "range", "scalar_tensor", "sparse_coo_tensor", "tensor", "zeros", "zeros_like",
)
# fmt: on
_TENSOR_FACTORIES = ("new_empty", "new_full", "new_ones", "new_tensor", "new_zeros")
_CPU = torch.device("cpu")


def cpu_for(device: Any) -> Any:
    """The CPU where ``device`` names a GPU (an index, "cuda...", a cuda ``torch.device``), else ``device`` itself."""
    if isinstance(device, int) and not isinstance(device, bool):
        return _CPU
    if isinstance(device, str) and device.split(":")[0] == "cuda":
        return _CPU
    if isinstance(device, torch.device) and device.type == "cuda":
        return _CPU
    return device


class NoStream:
    """Stands for a CUDA stream, or an event: everything issued to it has already happened."""

    device = _CPU
    cuda_stream = 0

    def __init__(self, *_: Any, **__: Any) -> None:
        """Accept and ignore whatever a stream is made from."""

    def __enter__(self) -> NoStream:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def query(self) -> bool:
        """Say that all work is done."""
        return True

    def record_event(self, event: NoEvent | None = None) -> NoEvent:
        """Return an event that has already happened."""
        return event or NoEvent()

    wait_event = wait_stream = record = wait = synchronize = lambda self, *_, **__: None


class NoEvent(NoStream):
    """Stands for a CUDA event that has already happened."""

    def elapsed_time(self, _: NoEvent) -> float:
        """Milliseconds between two events, none."""
        return 0.0


def _translated(function: Callable[..., Any], place: int | None = None) -> Callable[..., Any]:
    """Return the function with its keyword ``device``, or its argument at that place, read as the CPU."""

    @functools.wraps(function)
    def translated(*args: Any, **kwargs: Any) -> Any:
        if "device" in kwargs:
            kwargs["device"] = cpu_for(kwargs["device"])
        if place is not None and len(args) > place:
            args = (*args[:place], cpu_for(args[place]), *args[place + 1 :])
        return function(*args, **kwargs)

    return translated


def _without_devices(init: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(init)
    def translated(self: Any, module: torch.nn.Module, device_ids: Any = None, *args: Any, **kwargs: Any) -> None:
        if device_ids is not None and len(device_ids) > 1:
            init(self, module, device_ids, *args, **kwargs)  # refused by DDP itself, as the suite expects
            return
        if args:
            args = (None, *args[1:])
        kwargs.pop("output_device", None)
        init(self, module, None, *args, **kwargs)

    return translated


@contextlib.contextmanager
def _in_no_stream(_: Any) -> Iterator[None]:
    yield


def _constant(value: Any) -> Callable[..., Any]:
    return lambda *_, **__: value  # a new function for each name: torch.compile keeps a table of them by identity


def patch_ddp(ddp_class: type) -> None:
    """Make ``ddp_class`` ignore device_ids and output_device, which DDP refuses for CPU modules."""
    ddp_class.__init__ = _without_devices(ddp_class.__init__)


def install(device_count: int) -> None:
    """Patch torch in this process so that ``device_count`` GPUs seem to be there and all of them are the CPU."""
    for name in _FACTORIES:
        setattr(torch, name, _translated(getattr(torch, name)))
    for name in _TENSOR_FACTORIES:
        setattr(torch.Tensor, name, _translated(getattr(torch.Tensor, name)))
    for owner in (torch.Tensor, torch.nn.Module):
        owner.to = _translated(owner.to, 1)
        owner.cuda = lambda self, *_, **__: self

    torch.Stream = torch.cuda.Stream = NoStream
    torch.Event = torch.cuda.Event = NoEvent
    for module in (torch.cuda, torch.accelerator):
        module.device_count = _constant(device_count)
        module.synchronize = _constant(None)
        module.current_stream = lambda *_: NoStream()
    torch.accelerator.set_device_index = _constant(None)
    torch.cuda.set_device = _constant(None)
    torch.cuda.current_device = _constant(0)
    torch.cuda.default_stream = lambda *_: NoStream()
    torch.cuda.stream = _in_no_stream
