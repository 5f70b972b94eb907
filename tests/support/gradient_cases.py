"""A small model whose gradients are large enough to be computed in the heap, and what is asked of it."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from probes import bytes_in_heap
from torch import nn

from ourddp import DistributedDataParallel

WIDTH = 128  # a weight's gradient has 64 KiB: large enough to be reduced where it lies
WEIGHT_BYTES = WIDTH * WIDTH * 4


def make_model(depth: int = 3) -> nn.Module:
    """Return a stack of linear layers, the same in every rank."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(depth)))


def inputs_of(rank: int) -> torch.Tensor:
    """Return a rank's inputs."""
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(rank))


def weights(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters whose gradients belong into the heap."""
    return [parameter for parameter in model.parameters() if parameter.ndim > 1]


def backward(model: nn.Module, rank: int) -> None:
    """Do a rank's forward and backward."""
    model(inputs_of(rank)).square().mean().backward()


def check_averages(model: DistributedDataParallel, world: int) -> None:
    """Compare the gradients with those of one process that has seen all ranks' inputs."""
    alone = copy.deepcopy(model.module)
    alone.zero_grad()
    for rank in range(world):
        (alone(inputs_of(rank)).square().mean() / world).backward()
    for mine, expected in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, expected.grad, rtol=1e-4, atol=1e-6)


@contextmanager
def called_in_backward(function: Callable[[], None]) -> Iterator[None]:
    """Have ``function`` called whenever the backward of a forward inside unpacks a saved tensor.

    Autograd does not know of it: with a hook that it knew of, gradients would not be reduced where they lie.
    """

    def unpack(saved: torch.Tensor) -> torch.Tensor:
        function()
        return saved

    with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, unpack):
        yield


@contextmanager
def memory_returned() -> Iterator[None]:
    """Fail unless all memory that the ranks take from the heap inside is returned."""
    gc.collect()
    dist.barrier()
    before = bytes_in_heap()
    dist.barrier()
    yield
    gc.collect()
    dist.barrier()
    assert bytes_in_heap() == before
    dist.barrier()
