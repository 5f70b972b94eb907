"""Unequal shares of a batch, and the gradients of one process that has all of it, for tests of weighted gradients."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from ddp_cases import MODELS, averaging_hook, make_model
from torch import nn

from ourddp import DistributedDataParallel

# The model with gradients that are reduced where they lie.
MODELS["wide"] = lambda: nn.Sequential(nn.Linear(8, 2048), nn.Tanh(), nn.Linear(2048, 16), nn.Tanh(), nn.Linear(16, 3))
SHAPES = ["mlp", "wide", "transposed", "two_types", "mixed", "sparse", "checkpoint"]
ROUNDING = 5e-6  # of a gradient in float32; in float64 it is far less

Split = Sequence[Sequence[int]]  # the sizes of each rank's micro-batches


def batch_of(split: Split, seed: int, dtype: torch.dtype) -> list[list[torch.Tensor]]:
    """Return each rank's micro-batches, the same in every process."""
    generator = torch.Generator().manual_seed(seed)
    return [[torch.randn(size, 8, generator=generator).to(dtype) for size in sizes] for sizes in split]


def dtype_of(model: nn.Module) -> torch.dtype:
    return next(p.dtype for p in model.parameters() if p.dtype.is_floating_point)


def sum_loss(output: torch.Tensor) -> torch.Tensor:
    return output.square().sum() + output.sum()


def total_of(split: Split) -> int:
    return sum(map(sum, split))


def expected_gradients(alone: nn.Module, split: Split, seed: int) -> list[torch.Tensor | None]:
    """Return the gradients of the mean over all samples."""
    alone.zero_grad()
    everything = torch.cat([part for parts in batch_of(split, seed, dtype_of(alone)) for part in parts])
    (sum_loss(alone(everything)) / total_of(split)).backward()
    return [parameter.grad for parameter in alone.parameters()]


def accumulate(model: DistributedDataParallel, rank: int, split: Split, seed: int) -> None:
    """Run this rank's micro-batches, of which the last one reduces."""
    parts = batch_of(split, seed, dtype_of(model))[rank]
    for index, part in enumerate(parts):
        with contextlib.nullcontext() if index == len(parts) - 1 else model.no_sync():
            output = model(part)
            sum_loss(output).backward()


def assert_close(
    model: nn.Module, expected: Sequence[torch.Tensor | None], tolerance: float = ROUNDING, where: object = ""
) -> None:
    for (name, parameter), gradient in zip(model.named_parameters(), expected, strict=True):
        if gradient is None:
            assert parameter.grad is None
            continue
        assert parameter.grad.dtype == parameter.dtype
        mine, theirs = parameter.grad.to_dense(), gradient.to_dense()
        error = ((mine - theirs).norm() / theirs.norm()).item()
        assert error <= tolerance, f"the gradient of {name} is off by {error}, {where}"


def check(rank: int, name: str, options: dict[str, Any], splits: Sequence[Split], **how: Any) -> Any:
    """Compare the gradients of each split with those of one process; the model gets better meanwhile."""
    alone, module = make_model(name), make_model(name)
    if how.get("double"):
        alone, module = alone.double(), module.double()
    model = DistributedDataParallel(module, **options)
    if "hook" in how:
        how["hook"](model)
    for step, split in enumerate(splits):
        model.zero_grad(set_to_none=step % 2 == 0)
        model.set_weight(sum(split[rank]))
        accumulate(model, rank, split, step)
        assert_close(
            model, expected_gradients(alone, split, step), how.get("tolerance", ROUNDING), (step, split, name, options)
        )
        with torch.no_grad():
            for mine, theirs in zip(module.parameters(), alone.parameters(), strict=True):
                if theirs.grad is not None:
                    theirs -= 0.01 * theirs.grad.to_dense()
                mine.copy_(theirs)
    return model


UNEVEN: list[Split] = [[[5], [1]], [[0], [3]], [[2], [7]], [[4], [0]]]

WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "small buckets": {"bucket_cap_mb": 0.002},
    "views": {"gradient_as_bucket_view": True, "bucket_cap_mb": 0.002},
    "unused": {"find_unused_parameters": True},
    "static": {"static_graph": True},
}


def average_by_hook(model: DistributedDataParallel) -> None:
    model.register_comm_hook([], averaging_hook)


def number_of_collectives() -> int:
    return dist.group.WORLD._get_backend(torch.device("cpu"))._get_sequence_number_for_group()
