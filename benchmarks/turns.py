"""Jobs that each have processes of their own, run side by side and take turns.

`run_in_turns([__file__], plans, ...)` starts one job of ranks for each plan; there the file works inside `with
StartedRanks() as ranks`, as under `harness.run_ranks`, and ends with `take_turns(ranks, action)`. So all jobs see the
same machine at the same time, and none sees what another leaves behind in a process: such as its allocator's free
lists.
"""

from __future__ import annotations

import contextlib
import gc
import os
import socket
import struct
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from ourddp.bench import harness

WARM_UP_ROUNDS = 2
GO = b"t"
SECONDS = struct.Struct("d")


def run_in_turns(
    program: list[str], plans: dict[str, Any], ranks: int, *, budget: float, least: int, most: int, timeout: float
) -> tuple[dict[str, Any], dict[str, list[float]]]:
    """Run a job of `ranks` ranks for each plan, in turns, and return every job's report and its seconds.

    In a turn a job acts twice, and the second time is timed, as in `Ranks.measure`. There are `least` to `most` rounds:
    as many as fit into `budget` seconds going by the second of two warm-up rounds. Raises RuntimeError where a rank
    fails or `timeout` seconds pass; no rank is left behind.
    """
    with ThreadPoolExecutor(len(plans)) as pool:
        jobs = {name: _Job(pool, program, plan, ranks, timeout) for name, plan in plans.items()}
        try:
            for job in jobs.values():
                job.receive()  # it is ready
            for _ in range(WARM_UP_ROUNDS):
                start = time.perf_counter()
                for job in jobs.values():
                    job.turn()
                seconds = time.perf_counter() - start
            rounds = max(least, min(most, int(budget / seconds)))
            names = list(jobs)
            times: dict[str, list[float]] = {name: [] for name in names}
            for turn in range(rounds):
                for name in (names[place] for place in harness.order(len(names), turn)):
                    times[name].append(jobs[name].turn())
        finally:
            for job in jobs.values():
                job.end()
        return {name: job.report() for name, job in jobs.items()}, times


def take_turns(ranks: harness.Ranks, action: Callable[[], object]) -> None:
    """Do the action whenever run_in_turns gives this job a turn, and tell it the seconds, until it gives no more."""
    gc.collect()
    gc.disable()
    giver = socket.socket(fileno=int(os.environ[harness.TURNS])) if ranks.rank == 0 else None
    if giver is not None:
        giver.sendall(SECONDS.pack(0))  # ready
    while ranks.agree(1 if giver is not None and giver.recv(1) else 0):
        seconds = ranks.span(ranks.turn_of(action, 1))
        if giver is not None:
            giver.sendall(SECONDS.pack(float(seconds)))
    if giver is not None:
        giver.close()
    gc.enable()


class _Job:
    """One job, as seen by the process that gives the turns."""

    def __init__(self, pool: ThreadPoolExecutor, program: list[str], plan: Any, ranks: int, timeout: float) -> None:
        self._socket, theirs = socket.socketpair()
        self._socket.settimeout(timeout)
        self._ended: Future[Any] = pool.submit(self._run, theirs, program, plan, ranks, timeout)

    @staticmethod
    def _run(theirs: socket.socket, program: list[str], plan: Any, ranks: int, timeout: float) -> Any:
        with theirs:
            return harness.run_ranks(program, plan, ranks, mpi=False, timeout=timeout, turns=theirs)

    def turn(self) -> float:
        """Let the job act; return the seconds that it took. RuntimeError if it has ended."""
        with contextlib.suppress(OSError):  # it has ended, and receive() says why
            self._socket.sendall(GO)
        return self.receive()

    def receive(self) -> float:
        """Wait for the job's next number; RuntimeError where it has ended, or does not come."""
        try:
            data = self._socket.recv(SECONDS.size)
        except TimeoutError:
            raise RuntimeError("a job of the benchmark did not take its turn in time") from None
        except OSError:
            data = b""
        if len(data) < SECONDS.size:
            self.report()
            raise RuntimeError("a job of the benchmark ended before its turns did")
        return float(SECONDS.unpack(data)[0])

    def end(self) -> None:
        """Let the job end, which it does after the turn under way."""
        self._socket.close()

    def report(self) -> Any:
        """Wait for the job's end and return its report; RuntimeError where it failed."""
        return self._ended.result()
