"""Runs trials on this machine, each in a process group of its own, and several at a time."""

from __future__ import annotations

import itertools
import math
import pickle
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from multiprocessing import connection
from typing import Any

from ourddp.spawned import LONGEST_WAIT, Call, SpawnedRanks


@dataclass(frozen=True)
class Trial:
    """One trial of a sweep."""

    number: int  #: from 0, in the order in which the trials begin
    parameters: dict[str, Any]

    def __getitem__(self, name: str) -> Any:
        return self.parameters[name]


@dataclass(frozen=True)
class Outcome:
    """How a trial has ended."""

    seconds: float
    result: Any = None  #: what rank 0 returned
    error: str = ""  #: why there is none; the last line says it in short


@dataclass(frozen=True)
class Plan:
    """What all trials of a sweep have in common."""

    fn: bytes  # a pickled function, since Ray pickles what the ranks' own processes could not
    ranks: int
    threads: int  # of each rank
    backend: str
    timeout: float = math.inf  # seconds


def run(plan: Plan, trials: Iterable[Trial], most: int) -> Iterator[tuple[Trial, Outcome]]:
    """Yield each trial when it has ended. At most `most` run at a time, and none when the generator is closed."""
    trials = iter(trials)
    running: list[_Running] = []
    try:
        while True:
            for trial in itertools.islice(trials, most - len(running)):
                running.append(_Running(plan, trial))
            if not running:
                return
            left = min(each.seconds_left() for each in running)
            connection.wait([end for each in running for end in each.sentinels()], min(left, LONGEST_WAIT))
            for each in running[:]:
                outcome = each.outcome()
                if outcome is not None:
                    each.stop()
                    running.remove(each)
                    yield each.trial, outcome
    finally:
        for each in running:
            each.stop()


class _Running:
    """A trial whose ranks are running."""

    def __init__(self, plan: Plan, trial: Trial) -> None:
        self.trial = trial
        self._plan = plan
        self._begin = time.monotonic()
        args = pickle.dumps((trial,))
        self._ranks = SpawnedRanks(Call(plan.fn, args, plan.ranks, plan.threads, plan.backend, keep=1))
        self.sentinels, self.stop = self._ranks.sentinels, self._ranks.stop

    def seconds_left(self) -> float:
        """Return the seconds until the trial has to be over."""
        return max(0.0, self._begin + self._plan.timeout - time.monotonic())

    def outcome(self) -> Outcome | None:
        """Return how the trial has ended, or None if it runs on. It ends with the first rank that fails."""
        ended, failed = self._ranks.look()
        seconds = time.monotonic() - self._begin
        if failed is not None:
            return Outcome(seconds, error=self._ranks.describe(failed))
        if ended:
            try:
                return Outcome(seconds, self._ranks.result(0))
            except RuntimeError as error:
                return Outcome(seconds, error=str(error))
        if self.seconds_left() == 0:
            return Outcome(seconds, error=f"the trial took more than {self._plan.timeout:g} s")
        return None
