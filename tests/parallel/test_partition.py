"""The cut of layers into stages, without any process."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ourddp.partition import cut


def counts_between(inner: tuple[int, ...], end: int) -> list[int]:
    return [after - before for before, after in itertools.pairwise([0, *inner, end])]


def largest(costs: list[int], counts: list[int]) -> int:
    bounds = [0, *itertools.accumulate(counts)]
    return max(sum(costs[begin:end]) for begin, end in itertools.pairwise(bounds))


@settings(deadline=None)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=8), st.data())
def test_no_other_cut_has_a_smaller_largest_stage(costs: list[int], data: st.DataObject) -> None:
    stages = data.draw(st.integers(1, len(costs)))
    counts = cut(costs, stages)
    ways = itertools.combinations(range(1, len(costs)), stages - 1)
    best = min(largest(costs, counts_between(way, len(costs))) for way in ways)
    assert len(counts) == stages
    assert min(counts) >= 1
    assert sum(counts) == len(costs)
    assert largest(costs, counts) == best


@pytest.mark.parametrize(
    ("costs", "stages", "counts"),
    [
        ([5], 1, [1]),
        ([1, 2, 3], 3, [1, 1, 1]),
        ([1, 1, 1, 1], 2, [2, 2]),
        ([9, 1, 1, 1], 2, [1, 3]),
        ([1, 1, 1, 9], 2, [3, 1]),
        ([0.1, 0.2, 0.3, 0.4, 0.5], 2, [3, 2]),
        ([1, 1, 1, 1, 1], 2, [2, 3]),  # as good as 3 and 2; the last stage gets more
        ([0, 0, 0, 0], 3, [1, 1, 2]),
    ],
)
def test_known_cuts(costs: list[float], stages: int, counts: list[int]) -> None:
    assert cut(costs, stages) == counts


def test_stages_begin_only_where_they_may() -> None:
    assert cut([1, 1, 1, 9, 1, 1], 2) == [3, 3]
    assert cut([1, 1, 1, 9, 1, 1], 2, beginnings=[2, 4]) == [2, 4]
    assert cut([9, 1, 1, 1, 1, 1], 3, beginnings=[4, 5]) == [4, 1, 1]


@pytest.mark.parametrize(
    ("costs", "stages", "beginnings", "message"),
    [
        ([1, 2], 3, None, "2 layers, 2 of which can begin a stage, cannot make 3 stages: use fewer ranks"),
        ([], 1, None, "0 layers"),
        ([1, 2], 0, None, "cannot make 0 stages"),
        ([1, 2, 3], 3, [2], "3 layers, 2 of which can begin a stage"),
        ([1, -1], 1, None, "finite and not negative"),
        ([1, math.nan], 1, None, "finite and not negative"),
        ([1, math.inf], 1, None, "finite and not negative"),
    ],
)
def test_impossible_cuts_are_refused(
    costs: list[float], stages: int, beginnings: list[int] | None, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        cut(costs, stages, beginnings)
