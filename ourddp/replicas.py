"""Copies of a module on other devices, whose memory is kept from step to step, and the count of what they are sent."""

from __future__ import annotations

import threading
from collections.abc import Iterable
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
                self.bytes += tensor.nbytes


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


class _Copies:
    """Copies of a module's tensors on other devices, by the tensors' places in it.

    What was sent last is kept on the module's own device as well, and tells whether a tensor has changed: nothing else
    does, since neither a write through tensor.data nor a step of batch norm counts as a version. To be compared with
    the copies elsewhere, a tensor would have to be sent.
    """

    def __init__(self, devices: list[torch.device]) -> None:
        self._devices = devices
        self._sent: dict[int, torch.Tensor] = {}
        self._editions: dict[int, int] = {}  # how often each tensor has changed
        self._copies: dict[tuple[int, int], torch.Tensor] = {}  # by replica and place,
        self._copied: dict[tuple[int, int], int] = {}  # and the editions that they are of

    def refresh(self, tensors: list[torch.Tensor], replicas: int, count: Transfer) -> list[list[torch.Tensor]]:
        """Return the copies of the first replicas; only those of tensors that have changed are sent."""
        for place, tensor in enumerate(tensors):
            sent = self._sent.get(place)
            if sent is None or sent.dtype != tensor.dtype or not torch.equal(sent, tensor):
                self._sent[place] = tensor.clone()
                self._editions[place] = self._editions.get(place, 0) + 1
        for replica in range(replicas):
            # A copy that is left alone may still be needed by the backward of an earlier forward.
            count.add([tensor for place, tensor in enumerate(tensors) if self._update(replica, place, tensor)])
        return [[self._copies[replica, place] for place in range(len(tensors))] for replica in range(replicas)]

    def _update(self, replica: int, place: int, tensor: torch.Tensor) -> bool:
        key = replica, place
        if self._copied.get(key) == self._editions[place]:
            return False
        copy = self._copies.get(key)
        if copy is None or copy.shape != tensor.shape or copy.dtype != tensor.dtype:
            self._copies[key] = copy = torch.empty_like(tensor, device=self._devices[replica], requires_grad=False)
        copy.copy_(tensor)
        self._copied[key] = self._editions[place]
        return True


class Replicas:
    """The copies of a module on the devices beside the first, where the module itself is."""

    def __init__(self, devices: list[torch.device]) -> None:
        """Remember where the replicas are; `devices` leaves out that of the module."""
        self._parameters, self._buffers = _Copies(devices), _Copies(devices)

    def of(self, module: nn.Module, count: int, counts: Counts) -> list[nn.Module]:
        """Return the first `count` replicas of `module` as it is now; backward adds their gradients to its own."""
        # A parameter that two layers share is one here as well.
        parameters, buffers = list(module.parameters()), list(module.buffers())
        # Training could not use copies made in inference mode. Leaving that mode would turn gradients on.
        with torch.inference_mode(False), torch.no_grad():
            copies = self._parameters.refresh(parameters, count, counts["parameters"])
            kept = self._buffers.refresh(buffers, count, counts["buffers"])
            # A replica writes to its buffers, and backward may need what they were in this forward.
            copied_buffers = [[copy.clone() for copy in each] for each in kept]
        replicas = []
        for lent, lent_buffers in zip(copies, copied_buffers, strict=True):
            tensors = [*_lend(parameters, lent, counts), *lent_buffers]
            originals = map(id, [*parameters, *buffers])
            replicas.append(_with_tensors(module, dict(zip(originals, tensors, strict=True))))
        return replicas


def _lend(parameters: list[torch.Tensor], copies: list[torch.Tensor], counts: Counts) -> list[torch.Tensor]:
    """Return the copies, so that backward takes the gradients of those that are trained to the parameters."""
    trained = [place for place, parameter in enumerate(parameters) if parameter.requires_grad]
    lent = list(copies)
    if torch.is_grad_enabled() and trained:
        tensors = _Lend.apply(counts, [copies[place] for place in trained], *(parameters[place] for place in trained))
        for place, tensor in zip(trained, tensors, strict=True):
            lent[place] = tensor
    return lent


def _with_tensors(module: nn.Module, copies: dict[int, torch.Tensor]) -> nn.Module:
    """Return a module like `module`, with copies, by the tensors' id(), in the place of its parameters and buffers.

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
            copy = copies[id(parameter)]
            # It is an attribute and not a parameter, since it is no leaf of the graph.
            setattr(shell, name, copy)
            shell._former_parameters[name] = copy
        for name, buffer in layer._buffers.items():
            shell._buffers[name] = None if buffer is None else copies[id(buffer)]
    return shells[module]
