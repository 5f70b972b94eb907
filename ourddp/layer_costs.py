"""What the layers of a model cost: time, weights, and what they keep between forward and backward."""

from __future__ import annotations

import copy
import dataclasses
import time
from collections.abc import Sequence

import torch
from torch import Tensor, nn

__all__ = ["LayerCost", "measure"]

_REPEATS = 5


@dataclasses.dataclass(frozen=True)
class LayerCost:
    """The cost of one layer for one micro-batch."""

    seconds: float  # of forward and backward
    weight_bytes: int  # parameters and buffers
    activation_bytes: int  # what forward keeps for backward, besides weights


def measure(layers: Sequence[nn.Module], inputs: Tensor) -> list[LayerCost]:
    """Run forward and backward of each layer on a micro-batch, and return what each of them costs.

    The layers, their gradients and buffers, and the random state stay as they are. ``inputs`` is what the first layer
    gets; any shape and dtype.

    Raises:
        TypeError: If a layer returns anything but a tensor.
        ValueError: If a layer raises an error, which the message has.

    """
    devices = [inputs.device] if inputs.is_cuda else []
    costs = []
    with torch.random.fork_rng(devices), torch.enable_grad():
        keeps_output = False
        for index, layer in enumerate(layers):
            inputs = inputs.detach().requires_grad_(index > 0 and inputs.is_floating_point())
            try:
                probe = copy.deepcopy(layer)
                given = inputs.clone()  # which the layer may change in place
                output, kept = _saved(probe, given)
                seconds = [_time(probe, inputs) for _ in range(_REPEATS) if isinstance(output, Tensor)]
            except Exception as error:  # a layer may raise anything
                shape = tuple(inputs.shape)
                raise ValueError(f"layer {index} ({type(layer).__name__}) fails on inputs {shape}: {error}") from error
            if not isinstance(output, Tensor):
                raise TypeError(
                    f"layer {index} ({type(layer).__name__}) returns {type(output).__name__}; wrap it in a module that "
                    "takes one tensor and returns one"
                )
            # What the layer before keeps as its output takes no more memory if this one keeps it as its input.
            twice = kept.get(_address(given), 0) if keeps_output else 0
            keeps_output = _address(output) in kept
            weights = sum(weight.nbytes for weight in (*layer.parameters(), *layer.buffers()))
            # The least of several: whatever else the machine does can only add to it.
            costs.append(LayerCost(min(seconds), weights, sum(kept.values()) - twice))
            inputs = output
    return costs


def _saved(layer: nn.Module, inputs: Tensor) -> tuple[Tensor, dict[int, int]]:
    """Run forward. Return its output, and the bytes of what it keeps for backward besides weights, by address."""
    weights = {_address(tensor) for tensor in (*layer.parameters(), *layer.buffers())}
    storages: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        if _address(tensor) not in weights:
            storages[_address(tensor)] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        return layer(inputs), storages


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _time(layer: nn.Module, inputs: Tensor) -> float:
    """Return the seconds of one forward and backward."""
    inputs = inputs.clone()
    begin = _now(inputs)
    output = layer(inputs)
    if output.requires_grad:
        output.backward(torch.ones_like(output))
    return _now(inputs) - begin


def _now(inputs: Tensor) -> float:
    if inputs.is_cuda:
        torch.cuda.synchronize(inputs.device)
    return time.perf_counter()
