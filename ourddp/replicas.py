"""Copies of a module on other devices, whose memory is kept from step to step, and the count of what they are sent."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

KINDS = ("inputs", "parameters", "buffers", "outputs", "output_gradients", "gradients", "input_gradients")

# Backward counts in a thread for each device. One lock serves all counts, so that these can be copied and pickled.
_counting = threading.Lock()


@dataclass
class Transfer:
    """What went between the first device and the others."""

    tensors: int = 0
    bytes: int = 0

    def add(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count tensors that are sent."""
        with _counting:
            for tensor in tensors:
                self.tensors += 1
                self.bytes += tensor.numel() * tensor.element_size()


class Counts(dict[str, Transfer]):
    """The transfers since the last reset, by kind (see KINDS)."""

    def __init__(self) -> None:
        super().__init__((kind, Transfer()) for kind in KINDS)

    def reset(self) -> None:
        """Begin to count anew; the backward of an earlier forward counts here, too."""
        with _counting:
            for transfer in self.values():
                transfer.tensors = transfer.bytes = 0


class _Move(torch.autograd.Function):
    """Moves a tensor to another device, and its gradient back; counts both.

    On the device where it is already, the tensor is only counted.
    """

    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, device: torch.device, forward: Transfer, backward: Transfer
    ) -> torch.Tensor:
        ctx.source, ctx.count = tensor.device, backward
        forward.add([tensor])
        return tensor.to(device) if tensor.device != device else tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        ctx.count.add([gradient])
        return gradient.to(ctx.source), None, None, None


def move(tensor: torch.Tensor, device: torch.device, forward: Transfer, backward: Transfer) -> torch.Tensor:
    """Return `tensor` on `device`, so that backward brings its gradient back; count what that moves."""
    return _Move.apply(tensor, device, forward, backward)


class _Lend(torch.autograd.Function):
    """Gives a replica its copies of parameters; backward takes the copies' gradients to the parameters."""

    @staticmethod
    def forward(
        ctx: Any, counts: Counts, copies: list[torch.Tensor], *parameters: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.counts, ctx.device = counts, parameters[0].device
        ctx.set_materialize_grads(False)
        return tuple(copy.detach() for copy in copies)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        ctx.counts["gradients"].add([gradient for gradient in gradients if gradient is not None])
        return None, None, *(None if gradient is None else gradient.to(ctx.device) for gradient in gradients)


class _Memory:
    """One device's copies of the tensors of a module, by their places in it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._copies: dict[int, torch.Tensor] = {}
        self._versions: dict[int, int] = {}

    def refresh(self, tensors: list[torch.Tensor], count: Transfer) -> list[torch.Tensor]:
        """Return copies of the tensors; only those that have changed are sent."""
        changed = [tensor for place, tensor in enumerate(tensors) if self._update(place, tensor)]
        count.add(changed)
        return [self._copies[place] for place in range(len(tensors))]

    def _update(self, place: int, tensor: torch.Tensor) -> bool:
        copy = self._copies.get(place)
        if copy is None or copy.shape != tensor.shape or copy.dtype != tensor.dtype:
            self._copies[place] = copy = torch.empty_like(tensor, device=self._device, requires_grad=False)
        elif self._versions[place] == tensor._version and torch.equal(copy, tensor.to(self._device)):
            # A write through tensor.data does not count as a version, so the version alone would not do. A copy that is
            # left alone may still be needed by the backward of an earlier forward.
            return False
        copy.copy_(tensor)
        self._versions[place] = tensor._version
        return True


class Replicas:
    """The copies of a module on the devices beside the first, where the module itself is."""

    def __init__(self, devices: list[torch.device]) -> None:
        """Remember where the replicas are; `devices` leaves out that of the module."""
        self._parameters = [_Memory(device) for device in devices]
        self._buffers = [_Memory(device) for device in devices]

    def of(self, module: nn.Module, count: int, counts: Counts) -> list[nn.Module]:
        """Return the first `count` replicas of `module` as it is now; backward adds their gradients to its own."""
        return [self._make(module, place, counts) for place in range(count)]

    def _make(self, module: nn.Module, place: int, counts: Counts) -> nn.Module:
        with torch.no_grad():
            # A parameter that two layers share is one here as well.
            parameters, buffers = list(module.parameters()), list(module.buffers())
            copies = self._parameters[place].refresh(parameters, counts["parameters"])
            copied_buffers = self._buffers[place].refresh(buffers, counts["buffers"])
        trained = [number for number, tensor in enumerate(parameters) if tensor.requires_grad]
        if torch.is_grad_enabled() and trained:
            lent = _Lend.apply(counts, [copies[k] for k in trained], *(parameters[k] for k in trained))
            copies = list(copies)
            for number, tensor in zip(trained, lent, strict=True):
                copies[number] = tensor
        copy_of = {id(tensor): copy for tensor, copy in zip(parameters, copies, strict=True)}
        copy_of.update((id(tensor), copy) for tensor, copy in zip(buffers, copied_buffers, strict=True))
        return _with_tensors(module, lambda tensor: copy_of[id(tensor)])


def _with_tensors(module: nn.Module, copy_of: Callable[[torch.Tensor], torch.Tensor]) -> nn.Module:
    """Return a module like `module`, with the copies in the place of its parameters and buffers.

    Layers are copied without their tensors, in the way that layers provide for torch.nn.DataParallel.
    """
    shells = {layer: layer._replicate_for_data_parallel() for layer in module.modules()}
    for layer, shell in shells.items():
        shell._former_parameters = {}
        for name, child in layer._modules.items():
            shell._modules[name] = None if child is None else shells[child]
        for name, parameter in layer._parameters.items():
            if parameter is None:
                shell._parameters[name] = None
                continue
            copy = copy_of(parameter)
            # It is an attribute and not a parameter, since it is no leaf of the graph.
            setattr(shell, name, copy)
            shell._former_parameters[name] = copy
        for name, buffer in layer._buffers.items():
            shell._buffers[name] = None if buffer is None else copy_of(buffer)
    return shells[module]
