"""Averages of metrics over the ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from ourddp.objects import allgather_object

__all__ = ["average_metrics"]

Number = float | int | torch.Tensor


def average_metrics(
    metrics: Mapping[str, Number],
    weights: Number | Mapping[str, Number] | None = None,
    *,
    process_group: dist.ProcessGroup | None = None,
) -> dict[str, float]:
    """Return the average of each metric over the ranks, the same bits on all of them.

    Metrics are numbers, or tensors with one element. ``weights`` says what this rank's values count for, such as the
    number of samples that they are means over: one number, or one for each metric by name; 1 by default. A value with
    the weight 0 does not count at all, and a metric whose weights are all 0 is NaN. All ranks have to call it; it takes
    one collective, or two if the metrics of a rank take more than 4 kB.

    Raises ValueError, on all ranks, if metrics differ in their names, the message has these and the ranks; if one is no
    number; or if a weight is negative, not finite, or missing.
    """
    try:
        own: dict[str, tuple[float, float]] | str = _weighted(metrics, weights)
    except ValueError as error:
        own = str(error)
    everyone = allgather_object(own, process_group=process_group)
    wrong = [f"rank {rank}: {each}" for rank, each in enumerate(everyone) if isinstance(each, str)]
    if wrong:
        raise ValueError(f"metrics cannot be averaged: {'; '.join(wrong)}")
    _require_same_names(everyone)
    return {name: _average([each[name] for each in everyone]) for name in metrics}


def _weighted(
    metrics: Mapping[str, Number], weights: Number | Mapping[str, Number] | None
) -> dict[str, tuple[float, float]]:
    """Return the value and the weight of each metric; ValueError if something is no number."""
    pairs = {}
    for name, value in metrics.items():
        weight: Any = 1 if weights is None else weights
        if isinstance(weight, Mapping):
            if name not in weight:
                raise ValueError(f"weights has none for {name!r}")
            weight = weight[name]
        weight = _number(weight, f"the weight of {name!r}")
        if not 0 <= weight < math.inf:
            raise ValueError(f"the weight of {name!r} is {weight}; it must be finite and not negative")
        pairs[name] = (_number(value, repr(name)), weight)
    return pairs


def _number(value: Any, what: str) -> float:
    try:
        return float(value)
    except OverflowError:
        raise ValueError(f"{what} is too large for a floating-point number") from None
    except (TypeError, ValueError, RuntimeError):  # the last is what a tensor with several elements raises
        raise ValueError(f"{what} is no number but of type {type(value).__name__}") from None


def _require_same_names(everyone: list[dict[str, tuple[float, float]]]) -> None:
    names = dict.fromkeys(name for each in everyone for name in each)
    differing = []
    for name in names:
        having = [str(rank) for rank, each in enumerate(everyone) if name in each]
        if len(having) < len(everyone):
            differing.append(f"{name!r} is there on rank{'s' * (len(having) > 1)} {', '.join(having)} alone")
    if differing:
        raise ValueError(
            f"the {len(everyone)} ranks pass different metrics: {'; '.join(differing)}. All ranks must pass the same "
            "names; a rank without samples can pass any value with the weight 0"
        )


def _average(pairs: list[tuple[float, float]]) -> float:
    counting = [(value, weight) for value, weight in pairs if weight > 0]
    if not counting:
        return math.nan
    values = [value * weight for value, weight in counting]
    # fsum() refuses to add up opposite infinities, of which sum() makes NaN.
    total = math.fsum(values) if all(map(math.isfinite, values)) else sum(values)
    return total / math.fsum(weight for _, weight in counting)
