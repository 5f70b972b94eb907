"""Arithmetic of intervals, which are pairs of a begin and an end in any unit."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Sequence

__all__ = ["Interval", "common", "overlap", "union"]

Interval = tuple[float, float]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the same time as intervals that are apart, ascending."""
    apart: list[Interval] = []
    for begin, end in sorted(intervals):
        if apart and begin <= apart[-1][1]:
            apart[-1] = apart[-1][0], max(apart[-1][1], end)
        elif end > begin:
            apart.append((begin, end))
    return apart


def overlap(one: Sequence[Interval], other: Sequence[Interval]) -> float:
    """Return how long both last at once; each is ascending and apart."""
    return sum(end - begin for begin, end in common(one, other))


def common(one: Sequence[Interval], other: Sequence[Interval]) -> list[Interval]:
    """Return when both last at once; each is ascending and apart."""
    pairs = ((max(a, c), min(b, d)) for a, b in one for c, d in _near(other, a, b))
    return [(begin, end) for begin, end in pairs if end > begin]


def _near(intervals: Sequence[Interval], begin: float, end: float) -> list[Interval]:
    first = bisect.bisect_left(intervals, begin, key=lambda one: one[1])
    last = bisect.bisect_right(intervals, end, key=lambda one: one[0])
    return list(intervals[first:last])
