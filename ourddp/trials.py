"""Runs trials on this machine, each in a process group of its own, and several at a time."""

from __future__ import annotations

import itertools
import math
import multiprocessing
import os
import pickle
import signal
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing import start_processes

LONGEST_WAIT = 3600.0  # seconds; connection.wait() takes no infinity


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
    """A trial whose ranks are running. They meet in a folder, where rank 0 leaves the result."""

    def __init__(self, plan: Plan, trial: Trial) -> None:
        self.trial = trial
        self._plan = plan
        self._codes: list[int | None] = [None] * plan.ranks
        self._begin = time.monotonic()
        self._folder = tempfile.TemporaryDirectory(prefix="ourddp-trial-")
        others = multiprocessing.active_children()
        try:
            # If this process dies, torch has the ranks interrupted.
            self._ranks = start_processes(_rank, (plan, trial, self._folder.name), plan.ranks, join=False)
        except BaseException:  # an interrupt may come between two of them
            _end([process for process in multiprocessing.active_children() if process not in others])
            self._folder.cleanup()
            raise

    def sentinels(self) -> list[int]:
        """Return what connection.wait() needs to notice the end of a rank that the last outcome() did not."""
        each = zip(self._ranks.processes, self._codes, strict=True)
        return [process.sentinel for process, code in each if code is None]

    def seconds_left(self) -> float:
        """Return the seconds until the trial has to be over."""
        return max(0.0, self._begin + self._plan.timeout - time.monotonic())

    def outcome(self) -> Outcome | None:
        """Return how the trial has ended, or None if it runs on. It ends with the first rank that fails."""
        codes = self._codes = [process.exitcode for process in self._ranks.processes]
        seconds = time.monotonic() - self._begin
        failed = [rank for rank, code in enumerate(codes) if code]
        if failed:
            return Outcome(seconds, error=self._describe(min(failed, key=self._time_of_error)))
        if None not in codes:
            try:
                return Outcome(seconds, pickle.loads(Path(self._folder.name, "result").read_bytes()))
            except Exception as error:  # rank 0 has called sys.exit(), or unpickling ran what fails here
                return Outcome(seconds, error=f"rank 0 left no result that can be read: {error!r}")
        if self.seconds_left() == 0:
            return Outcome(seconds, error=f"the trial took more than {self._plan.timeout:g} s")
        return None

    def _time_of_error(self, rank: int) -> int:
        # A rank that dies leaves no time, but it makes others do so. Otherwise the first error is the cause.
        file = Path(self._folder.name, f"failed-{rank}")
        return int(file.read_text()) if file.exists() else 0

    def _describe(self, rank: int) -> str:
        file = Path(self._ranks.error_files[rank])
        if file.exists():
            return f"rank {rank}: {pickle.loads(file.read_bytes()).strip()}"
        code = self._ranks.processes[rank].exitcode
        return f"rank {rank} died of {signal.Signals(-code).name}" if code < 0 else f"rank {rank} exited with {code}"

    def stop(self) -> None:
        """Leave no process and no file behind."""
        _end(self._ranks.processes)
        for file in self._ranks.error_files:
            Path(file).unlink(missing_ok=True)
        self._folder.cleanup()


def _end(processes: Iterable[BaseProcess]) -> None:
    for process in processes:
        process.kill()
    for process in processes:
        process.join()


def _rank(rank: int, plan: Plan, trial: Trial, folder: str) -> None:
    """Run the function in one rank of a trial. Leave the time if it fails; torch writes the traceback."""
    try:
        _run_in_group(rank, plan, trial, folder)
    except Exception:
        # The clock of files is too coarse: peers fail within a millisecond.
        Path(folder, f"failed-{rank}").write_text(str(time.monotonic_ns()))
        raise


def _run_in_group(rank: int, plan: Plan, trial: Trial, folder: str) -> None:
    torch.set_num_threads(plan.threads)
    for name in ("RANK", "LOCAL_RANK"):
        os.environ[name] = str(rank)
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        os.environ[name] = str(plan.ranks)
    store = dist.FileStore(os.path.join(folder, "store"), plan.ranks)
    dist.init_process_group(plan.backend, store=store, rank=rank, world_size=plan.ranks)
    result = pickle.loads(plan.fn)(trial)
    if rank == 0:
        Path(folder, "result").write_bytes(pickle.dumps(result))
    dist.destroy_process_group()
