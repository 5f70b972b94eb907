"""What the tests of DistributedOptimizer share: batches, a model with its optimizer, and comparisons."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from ddp_cases import Mlp, bitwise_equal_everywhere
from torch import nn

from ourddp import DistributedOptimizer

PER_RANK = 4


def batch(step: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(PER_RANK, 8, generator=generator)


def whole_batch(step: int, world: int) -> torch.Tensor:
    return torch.cat([batch(step, rank) for rank in range(world)])


def make(kind: Callable[[], nn.Module] = Mlp, **arguments: Any) -> tuple[nn.Module, DistributedOptimizer]:
    torch.manual_seed(3)
    model = kind()
    inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return model, DistributedOptimizer(inner, model.named_parameters(), **arguments)


def gradients(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.grad for parameter in model.parameters()]


def same_everywhere(model: nn.Module) -> bool:
    return bitwise_equal_everywhere(nn.utils.parameters_to_vector(model.parameters()).detach())


def assert_trained_alike(model: nn.Module, alone: nn.Module, **tolerance: float) -> None:
    for mine, theirs in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, **tolerance)
    assert same_everywhere(model)
