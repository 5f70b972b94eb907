"""Random programs whose callbacks start collectives: all ranks run the same program, with different timing."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

KINDS = ["all_reduce", "broadcast", "all_gather", "reduce_scatter"]
MOST_BUCKETS = 8
MOST_STARTED = 3  # collectives that one callback starts


@dataclass
class Collective:
    """A collective of a program, and its callbacks in the order in which they are attached.

    Each callback is attached to the future of the collective (0) or to that of an earlier callback (1, 2, ...).
    """

    number: int
    kind: str
    size: int
    other_group: bool
    how: str  # "sync", "wait", "future", "leave"
    callbacks: list[tuple[int, list[Collective]]] = field(default_factory=list)


def make_program(seed: int) -> list[Collective]:
    """Return the program for this seed: the collectives that the main thread starts, one after another."""
    rng = random.Random(seed)
    count = 0

    def collective(depth: int) -> Collective:
        nonlocal count
        count += 1
        how = rng.choice(["sync", "wait", "future", "leave"]) if depth else rng.choice(["leave", "leave", "sync"])
        one = Collective(count, rng.choice(KINDS), rng.randint(1, 6), rng.random() < 0.2, how)
        if how == "leave" and rng.random() < (0.9 if depth == 0 else 0.4 if depth == 1 else 0):
            for attached in range(rng.randint(1, 5 - 2 * depth)):
                one.callbacks.append((rng.randint(0, attached), callback(depth + 1)))
        return one

    def callback(depth: int) -> list[Collective]:
        return [collective(depth) for _ in range(rng.randint(0, MOST_STARTED))]

    return [collective(0) for _ in range(rng.randint(1, MOST_BUCKETS))]


class Run:
    """A run of a program on one rank. The rank's own ``noise`` decides which callbacks run at once."""

    def __init__(self, program: list[Collective], noise: random.Random, groups: list[Any]) -> None:
        self._program = program
        self._noise = noise
        self._groups = groups
        self._ends: list[Callable[[], object]] = []
        self._lock = threading.Lock()
        self.checked = 0

    def run(self) -> None:
        for one in self._program:
            self._start(one)
        while self._ends:  # ending one may add others
            with self._lock:
                ends, self._ends = self._ends, []
            for end in ends:
                end()

    def _rest(self) -> None:
        if self._noise.random() < 0.3:
            time.sleep(self._noise.random() * 0.002)

    def _start(self, one: Collective) -> None:
        self._rest()
        group = self._groups[one.other_group]
        rank, world = dist.get_rank(group), dist.get_world_size(group)
        work, output, expected = issue(one, group, rank, world)

        def check() -> None:
            assert torch.equal(output, expected), f"collective {one}: {output} instead of {expected}"
            with self._lock:
                self.checked += 1

        if one.how == "sync":
            assert work is None
            return check()
        if one.how == "wait":
            work.wait()
            return check()
        if one.how == "future":
            work.get_future().wait()
            return check()
        if self._noise.random() < 0.4:
            work.wait()  # so that the callbacks run at once
        futures = [work.get_future()]
        for parent, callback in one.callbacks:
            future = futures[parent].then(lambda done, callback=callback: self._call(done, callback))
            futures.append(future)
        with self._lock:
            self._ends += [future.wait for future in futures]
        with self._lock:
            self._ends += [work.wait, check]
        return None

    def _call(self, done: Any, callback: list[Collective]) -> None:
        done.value()  # rethrows
        for one in callback:
            self._start(one)


def issue(one: Collective, group: Any, rank: int, world: int) -> tuple[Any, torch.Tensor, torch.Tensor]:
    """Start a collective. Return its Work, its output and the expected output."""

    def value(of: int) -> float:
        return float(one.number * 16 + of)

    mine = torch.full((one.size,), value(rank))
    total = sum(value(of) for of in range(world))
    with_work = {"group": group, "async_op": one.how != "sync"}
    if one.kind == "all_reduce":
        return dist.all_reduce(mine, **with_work), mine, torch.full_like(mine, total)
    if one.kind == "broadcast":
        source = one.number % world
        return dist.broadcast(mine, source, **with_work), mine, torch.full_like(mine, value(source))
    if one.kind == "all_gather":
        output = torch.empty(world * one.size)
        expected = torch.tensor([value(of) for of in range(world) for _ in range(one.size)])
        return dist.all_gather_into_tensor(output, mine, **with_work), output, expected
    output = torch.empty(one.size)
    work = dist.reduce_scatter_tensor(output, mine.repeat(world), **with_work)
    return work, output, torch.full_like(output, total)


def run_programs(rank: int, world: int, seeds: list[int]) -> int:
    """Run the programs for these seeds. Return the number of results that were checked; raise if one is wrong."""
    groups = [dist.new_group(), dist.new_group()]
    checked = 0
    for seed in seeds:
        run = Run(make_program(seed), random.Random(seed * 64 + rank), groups)
        run.run()
        checked += run.checked
    for group in groups:
        dist.destroy_process_group(group)
    return checked
