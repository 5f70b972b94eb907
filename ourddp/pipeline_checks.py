"""The settings of a pipeline, and what is refused before any of it is made."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ourddp.layer_costs import LayerCost

__all__ = ["Settings", "agree", "batch", "group_of", "no_shared_parameters", "some_samples"]

_SCHEDULES = ("gpipe", "1f1b", "interleaved")
_BALANCES = ("time", "memory")


@dataclasses.dataclass(frozen=True)
class Settings:
    """The arguments of a pipeline that all of its ranks must have the same of."""

    schedule: str
    micro_batches: int
    balance: str | Sequence[int]
    stages: int
    ranks: int

    def check(self, layers: int) -> None:
        """Raise a TypeError or ValueError if a setting is wrong, or does not fit the others or so many layers."""
        if self.schedule not in _SCHEDULES:
            raise ValueError(f"there is no schedule {self.schedule!r}: use one of {', '.join(_SCHEDULES)}")
        if type(self.micro_batches) is not int:
            raise TypeError(f"micro_batches must be an int, not {type(self.micro_batches).__name__}")
        if self.micro_batches < 1:
            raise ValueError(f"micro_batches must be at least 1, not {self.micro_batches}")
        per_rank = self.stages // self.ranks
        if self.schedule == "interleaved":
            if per_rank < 2:
                raise ValueError(f"interleaved needs several stages on each rank, not {per_rank}: use 1f1b instead")
            if self.micro_batches % self.ranks:
                raise ValueError(
                    f"interleaved needs a multiple of {self.ranks} micro-batches on {self.ranks} ranks, not "
                    f"{self.micro_batches}"
                )
        elif per_rank != 1:
            raise ValueError(f"{self.schedule} has one stage on each rank, not {per_rank}: use interleaved for more")
        if self.schedule == "1f1b" and self.micro_batches < self.stages:
            raise ValueError(
                f"1f1b needs a micro-batch for each of its {self.stages} stages, not {self.micro_batches}: raise "
                "micro_batches, or use gpipe"
            )
        if layers < self.stages:
            raise ValueError(
                f"{layers} layers cannot make {self.stages} stages: use fewer ranks or stages per rank, or split layers"
            )
        self._check_balance(layers)

    def _check_balance(self, layers: int) -> None:
        if isinstance(self.balance, str):
            if self.balance not in _BALANCES:
                raise ValueError(
                    f"there is no balance {self.balance!r}: use one of {', '.join(_BALANCES)}, or the number of layers "
                    "of each stage"
                )
            return
        if not isinstance(self.balance, (list, tuple)) or any(type(count) is not int for count in self.balance):
            raise TypeError(f"balance must be a string or a list of numbers of layers, not {self.balance!r}")
        if len(self.balance) != self.stages or min(self.balance) < 1 or sum(self.balance) != layers:
            raise ValueError(
                f"balance {list(self.balance)} does not fit: it takes {self.stages} numbers, one for each stage, of at "
                f"least 1, that add up to {layers} layers"
            )

    def cost(self, layer: LayerCost) -> float:
        """Return what the cut has to balance: seconds, or bytes on the rank that keeps the most activations."""
        if self.balance == "time":
            return layer.seconds
        kept = self.micro_batches if self.schedule == "gpipe" else min(self.stages, self.micro_batches)
        return 2 * layer.weight_bytes + kept * layer.activation_bytes  # gradients are as large as weights

    @property
    def bubble(self) -> float:
        """The part of the time in which a rank waits, if all stages take as long (Narayanan et al., 2021, 2.2)."""
        waits = self.ranks - 1
        return waits / (waits + self.micro_batches * (self.stages // self.ranks))


def group_of(group: dist.ProcessGroup | DeviceMesh | None, name: str) -> dist.ProcessGroup:
    """Return the process group that an argument stands for.

    Raises:
        RuntimeError: If there is no process group.
        ValueError: If a mesh has several dimensions, or this rank is not in the group.

    """
    if not dist.is_initialized():
        raise RuntimeError("there is no process group: call ourddp.init() first")
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ValueError(f"{name} is a mesh of {group.ndim} dimensions: pass one of them, such as mesh['pipe']")
        group = group.get_group()
    found = dist.group.WORLD if group is None else group
    if dist.get_rank(found) < 0:
        raise ValueError(f"rank {dist.get_rank()} is not in {name}: only its ranks may make the model")
    return found


def agree(
    group: dist.ProcessGroup,
    layers: nn.Sequential | Sequence[nn.Module],
    example: Tensor,
    loss_fn: Callable[..., Tensor],
    settings: Settings,
) -> dict[str, nn.Module]:
    """Return the layers by name if the arguments are right, and the same on all ranks of ``group``.

    Raises:
        TypeError, ValueError: On all ranks, if they are not.

    """
    mine: Any
    try:
        named = _named(layers)
        if not isinstance(example, Tensor):
            raise TypeError(f"example must be a tensor, the inputs of a batch, not {type(example).__name__}")
        if not callable(loss_fn):
            raise TypeError(f"loss_fn must be a function of outputs and targets, not {type(loss_fn).__name__}")
        settings.check(len(named))
        batch(example, settings.micro_batches)
        weights = [
            (f"{name}.{part}", tuple(tensor.shape), tensor.dtype, tensor.requires_grad)
            for name, layer in named.items()
            for part, tensor in (*layer.named_parameters(), *layer.named_buffers())
        ]
        mine = {
            "layers": [(name, type(layer).__qualname__) for name, layer in named.items()],
            "weights": weights,
            "example": (tuple(example.shape), example.dtype),
            "settings": dataclasses.astuple(settings),
        }
    except (TypeError, ValueError) as error:
        mine = error
    everyone: list[Any] = [None] * settings.ranks
    dist.all_gather_object(everyone, mine, group=group)
    if isinstance(mine, Exception):
        raise mine
    for rank, theirs in enumerate(everyone):
        if isinstance(theirs, Exception):
            raise type(theirs)(f"rank {rank} of the group: {theirs}")
        for part in theirs:
            if theirs[part] != everyone[0][part]:
                raise ValueError(
                    f"ranks 0 and {rank} of the group have different {part}: {everyone[0][part]} and {theirs[part]}. "
                    "All ranks must pass the same"
                )
    return named


def _named(layers: nn.Sequential | Sequence[nn.Module]) -> dict[str, nn.Module]:
    if isinstance(layers, nn.Sequential):
        named = dict(layers._modules)  # named_children() leaves out a layer that comes a second time
    elif isinstance(layers, (list, tuple, nn.ModuleList)):
        named = {str(index): layer for index, layer in enumerate(layers)}
    else:
        raise TypeError(f"layers must be an nn.Sequential or a list of modules, not {type(layers).__name__}")
    for name, layer in named.items():
        if not isinstance(layer, nn.Module):
            raise TypeError(f"layer {name} must be a module, not {type(layer).__name__}")
        if any(torch.nn.parameter.is_lazy(tensor) for tensor in layer.parameters()):
            raise ValueError(f"layer {name} does not know its shape yet: run a forward before cutting the model")
        for part, buffer in layer.named_buffers():
            if any(size > 1 and stride == 0 for size, stride in zip(buffer.shape, buffer.stride(), strict=True)):
                raise ValueError(
                    f"buffer {name}.{part} has the same memory for several elements, as expand() makes it, so it "
                    "cannot be received: register its contiguous()"
                )
    return named


def batch(inputs: Tensor, micro_batches: int) -> None:
    """Raise a ValueError unless a batch can be split into equal micro-batches."""
    some_samples(inputs)
    if len(inputs) % micro_batches:
        raise ValueError(
            f"a batch of shape {tuple(inputs.shape)} cannot be split into {micro_batches} equal micro-batches: pass a "
            f"multiple of {micro_batches} samples (DataLoader's drop_last leaves a smaller last batch out)"
        )


def some_samples(inputs: Tensor) -> None:
    """Raise a ValueError if a batch is empty, or is not one."""
    if inputs.dim() == 0 or len(inputs) == 0:
        raise ValueError(f"a batch of shape {tuple(inputs.shape)} has no samples: pass one of shape (N, ...)")


def no_shared_parameters(stages: list[list[nn.Module]]) -> None:
    """Raise a ValueError if layers of different stages share a parameter, whose copies would go different ways."""
    stage_of: dict[int, int] = {}
    for stage, layers in enumerate(stages):
        for name, parameter in (named for layer in layers for named in layer.named_parameters()):
            if stage_of.setdefault(id(parameter), stage) != stage:
                raise ValueError(
                    f"stages {stage_of[id(parameter)]} and {stage} share the parameter {name}: give each its own, or "
                    "choose a balance that puts their layers into one stage"
                )
