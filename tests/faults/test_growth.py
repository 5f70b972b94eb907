"""A short watch over each load, and what the judge of growth finds."""

from __future__ import annotations

import mmap
import os
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from ranks import RankPool

from faults.growth import ENVIRONMENT, TOLERANCES, judge, points_of
from faults.loads import LOADS, MAKING_GROUPS, Load, Step
from faults.samples import Sample, watch

# A few hundred bytes of each group are seen after so many.
STEPS = {"groups": 300, "failures": 60, "restarts": 60, "changes of ranks": 60}
TRIES = 4  # what leaks does so each time, and what only warms up does not


@pytest.mark.parametrize("name", LOADS)
def test_nothing_grows(name: str, rank_pool: Callable[..., RankPool]) -> None:
    # Where ranks are on several nodes, threads tell latecomers for seconds that a rank has left a group.
    place = 1 if name in MAKING_GROUPS else 1 + list(LOADS).index(name) % 2
    pool = rank_pool(2, nodes=place, env=ENVIRONMENT)
    for _ in range(TRIES):
        results = pool.run(watch, LOADS[name], points_of(STEPS.get(name, 140)), 0.2)
        found = [fault for samples in results for fault in judge(samples)]
        if not found:
            return
    assert not found


# --- what leaks ------------------------------------------------------------------------------------------------------

_held: list[object] = []


def descriptors(rank: int, world: int) -> Step:
    return lambda step: _held.append(os.open(os.devnull, os.O_RDONLY))


def threads(rank: int, world: int) -> Step:
    return lambda step: threading.Thread(target=threading.Event().wait, daemon=True).start()


def memory(rank: int, world: int) -> Step:
    return lambda step: _held.append(bytearray(2000))


def objects(rank: int, world: int) -> Step:
    return lambda step: _held.extend(object() for _ in range(20))


def mappings(rank: int, world: int) -> Step:
    def step(number: int) -> None:
        with Path(__file__).open("rb") as file:
            _held.append(mmap.mmap(file.fileno(), 1, access=mmap.ACCESS_READ))

    return step


@pytest.mark.parametrize(
    ("load", "found"),
    [
        (descriptors, "descriptor of /dev/null"),
        (threads, "thread python"),
        (memory, "malloc grows"),
        (objects, "objects grows"),
        (mappings, "mappings grows"),
    ],
)
def test_what_leaks_in_each_step_is_found(load: Load, found: str) -> None:
    with RankPool(1) as pool:
        (samples,) = pool.run(watch, load, points_of(100), 0.01)
    assert found in "\n".join(judge(samples))


# --- the judge -------------------------------------------------------------------------------------------------------


def run_of(*values: int, name: str = "malloc", counts: str = "") -> list[Sample]:
    """Return samples of a run in which an amount had these values, and there was one thread for each of ``counts``."""
    amounts = dict.fromkeys(TOLERANCES, 0)
    counted = [Counter({"thread": int(count)}) for count in counts or "1" * len(values)]
    return [
        Sample(10 * index, counted[index], {**amounts, name: TOLERANCES[name] * value // 100})
        for index, value in enumerate(values)
    ]


def test_steady_growth_is_told_from_a_warm_up_and_from_noise() -> None:
    assert judge(run_of(0, 500, 900, 900, 950, 900, 960, 905)) == []
    assert judge(run_of(0, 0, 0, 0, 0, 80, 0, 80)) == []
    assert len(judge(run_of(0, 10, 20, 30, 40, 80, 120, 160))) == 1
    for name in TOLERANCES:
        (found,) = judge(run_of(0, 100, 200, 300, 400, 500, 600, 700, name=name))
        assert found.startswith(name)
    assert judge(run_of(*[0] * 8, counts="12344444")) == []
    assert judge(run_of(*[0] * 8, counts="44444443")) == []
    assert judge(run_of(*[0] * 8, counts="44444445")) == ["1 more after 30 steps: thread"]
