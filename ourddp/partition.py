"""Cuts a sequence of layers into contiguous stages, so that the most expensive stage is as cheap as possible."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

__all__ = ["cut"]


def cut(costs: Sequence[float], stages: int, beginnings: Sequence[int] | None = None) -> list[int]:
    """Return the number of layers of each of ``stages`` stages, such that the largest sum of costs is the smallest.

    Each stage gets consecutive layers, at least one. ``costs`` may have any unit. ``beginnings`` are the layers with
    which a stage after the first may begin, in ascending order and without layer 0; all of them by default. Of several
    cuts that are as good, the last stages get the most layers: the first ones of a pipeline keep the most activations.

    This is the linear partition problem, solved by dynamic programming (Skiena, The Algorithm Design Manual, 3rd
    edition 2020, section 10.7), in O(layers^2 * stages) steps. PipeDream cuts by the same kind of recurrence (Narayanan
    et al., 2019, section 3.1, https://arxiv.org/abs/1806.03377).

    Raises:
        ValueError: If the layers do not suffice for so many stages, or a cost is negative or not finite.

    """
    if not all(math.isfinite(cost) and cost >= 0 for cost in costs):
        raise ValueError(f"the costs of layers must be finite and not negative, not {list(costs)}")
    bounds = [0, *(range(1, len(costs)) if beginnings is None else beginnings), len(costs)]
    if not 1 <= stages < len(bounds) or not costs:
        raise ValueError(
            f"{len(costs)} layers, {len(bounds) - 1} of which can begin a stage, cannot make {stages} stages: use "
            "fewer ranks or stages per rank, or split layers"
        )
    sums = [0.0, *itertools.accumulate(costs)]
    before = [sums[bound] for bound in bounds]  # what the layers before each bound cost
    # For the stages so far, which share the layers before bounds[end] in the best way: the cost of the largest one, and
    # the bound at which the last one begins.
    largest = [0.0] + [math.inf] * (len(bounds) - 1)
    chosen = []
    for stage in range(stages):
        best, begins = [math.inf] * len(bounds), [0] * len(bounds)
        for end in range(stage + 1, len(bounds)):
            best[end], begins[end] = min(
                (max(largest[begin], before[end] - before[begin]), begin) for begin in range(stage, end)
            )
        largest = best
        chosen.append(begins)
    counts, end = [], len(bounds) - 1
    for begins in reversed(chosen):
        counts.append(bounds[end] - bounds[begins[end]])
        end = begins[end]
    return counts[::-1]
