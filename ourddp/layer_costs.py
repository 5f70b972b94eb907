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
        kept: set[int] = set()
        for index, layer in enumerate(layers):
            probe = copy.deepcopy(layer)
            inputs = inputs.detach().requires_grad_(index > 0 and inputs.is_floating_point())
            try:
                output, kept, activations = _saved(probe, inputs, kept)
            except Exception as error:  # a layer may raise anything
                shape = tuple(inputs.shape)
                raise ValueError(f"layer {index} ({type(layer).__name__}) fails on inputs {shape}: {error}") from error
            if not isinstance(output, Tensor):
                raise TypeError(
                    f"layer {index} ({type(layer).__name__}) returns {type(output).__name__}; wrap it in a module that "
                    "takes one tensor and returns one"
                )
            # The least of several: whatever else the machine does can only add to it.
            seconds = min(_time(probe, inputs) for _ in range(_REPEATS))
            weights = [*layer.parameters(), *layer.buffers()]
            costs.append(LayerCost(seconds, sum(weight.nbytes for weight in weights), activations))
            inputs = output
    return costs


def _saved(layer: nn.Module, inputs: Tensor, kept_before: set[int]) -> tuple[Tensor, set[int], int]:
    """Run forward. Return its output, the addresses of what it keeps for backward, and how many bytes that is.

    ``kept_before`` are the addresses that the layer before keeps: what both keep takes memory only once.
    """
    weights = {tensor.untyped_storage().data_ptr() for tensor in (*layer.parameters(), *layer.buffers())}
    storages: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = layer(inputs)
    # Only the address of its input is certain to be the same storage still.
    twice = kept_before & storages.keys() & {inputs.untyped_storage().data_ptr()}
    return output, set(storages), sum(storages.values()) - sum(storages[address] for address in twice)


def _time(layer: nn.Module, inputs: Tensor) -> float:
    """Return the seconds of one forward and backward."""
    begin = _now(inputs)
    output = layer(inputs)
    if output.requires_grad:
        output.backward(torch.ones_like(output))
    return _now(inputs) - begin


def _now(inputs: Tensor) -> float:
    if inputs.is_cuda:
        torch.cuda.synchronize(inputs.device)
    return time.perf_counter()
