"""Checks that all ranks wrap the same model."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["check_same_model"]


def check_same_model(group: dist.ProcessGroup, parameters: Sequence[torch.Tensor], names: Sequence[str]) -> None:
    """Check that every rank of ``group`` has the same parameters: how many, and each one's dtype, shape and strides.

    A collective call. If the models agree, it costs one all-reduce of two integers; otherwise ranks exchange their
    descriptions. ``names`` run parallel to ``parameters`` and may differ, as those of a wrapped module do.

    Raises:
        RuntimeError: If they differ; the message names the first parameter that does, both shapes, and the ranks.

    """
    if group.size() == 1 or not parameters:
        return
    layouts = [_layout(parameter) for parameter in parameters]
    # Both the fingerprint and its negative have to fit into 64 bits.
    fingerprint = int.from_bytes(hashlib.sha256("\n".join(layouts).encode()).digest()[:7], "little")
    extremes = torch.tensor([fingerprint, -fingerprint], device=parameters[0].device)
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp.MAX
    group.allreduce([extremes], options).wait()
    largest, least_negated = extremes.tolist()
    if largest == -least_negated:
        return
    models: list[Any] = [None] * group.size()
    dist.all_gather_object(models, (layouts, list(names)), group=group)
    differences = [_difference(models[0], model, rank) for rank, model in enumerate(models)]
    raise RuntimeError(
        f"DDP expects same model across all ranks, but {'; '.join(filter(None, differences))}. "
        "Build the model from the same configuration on every rank."
    )


def _layout(parameter: torch.Tensor) -> str:
    text = f"{str(parameter.dtype).removeprefix('torch.')} {list(parameter.shape)}"
    if parameter.layout != torch.strided:
        return f"{text} {parameter.layout}"
    return text if parameter.is_contiguous() else f"{text} with strides {list(parameter.stride())}"


def _difference(zero: tuple[list[str], list[str]], other: tuple[list[str], list[str]], rank: int) -> str:
    """Return how the model of ``rank`` differs from rank 0's, both as layouts and names; empty if they agree."""
    for index, (here, there) in enumerate(zip(zero[0], other[0], strict=False)):
        if here != there:
            ours, theirs = zero[1][index], other[1][index]
            name = ours if ours == theirs else f"{ours} / {theirs}"
            return f"parameter {index} ({name}) is {here} on rank 0, which appears not to match {there} on rank {rank}"
    counts = len(zero[0]), len(other[0])
    if counts[0] == counts[1]:
        return ""
    shorter, longer = sorted((zero[1], other[1]), key=len)
    return (
        f"rank 0 has {counts[0]} params, while rank {rank} has {counts[1]}; "
        f"the first that only one of them has is {_first_only_in(longer, shorter)}"
    )


def _first_only_in(longer: list[str], shorter: list[str]) -> str:
    """Return the first name that only ``longer`` has, or if names do not tell, the one after the end of ``shorter``."""
    known = set(shorter)
    missing = [name for name in longer if name not in known]
    return missing[0] if len(missing) == len(longer) - len(shorter) else longer[len(shorter)]
