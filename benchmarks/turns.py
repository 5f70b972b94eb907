"""Jobs that each have processes of their own, run side by side and take turns.

`run_in_turns([__file__], plans, ...)` starts one job of ranks for each plan; there the file works inside `with
StartedRanks() as ranks`, as under `harness.run_ranks`, and ends with `take_turns(ranks, action)`. So all jobs see the
same machine at the same time, and none sees what another leaves behind in a process: such as its allocator's free
lists. Jobs that wait for their turn sleep.

A program whose jobs have more than one thing to do uses `Jobs`, which tells a job in each turn what to do, by a number,
and `serve(ranks, do)` in the ranks.
"""

from __future__ import annotations

import contextlib
import gc
import os
import socket
import struct
import tempfile
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from ourddp.bench import harness

WARM_UP_ROUNDS = 2
ASKED = struct.Struct("q")  # what to do
ANSWER = struct.Struct("d")  # what came of it, such as the seconds


def run_in_turns(
    program: list[str], plans: dict[str, Any], ranks: int, *, budget: float, least: int, most: int, timeout: float
) -> tuple[dict[str, Any], dict[str, list[float]]]:
    """Run a job of `ranks` ranks for each plan, in turns, and return every job's report and its seconds.

    In a turn a job acts twice, and the second time is timed, as in `Ranks.measure`. There are `least` to `most` rounds:
    as many as fit into `budget` seconds going by the second of two warm-up rounds. Raises RuntimeError where a rank
    fails or `timeout` seconds pass; no rank is left behind.
    """
    with Jobs(program, plans, ranks, timeout=timeout) as jobs:
        round_takes = sum(jobs.warm_up(plans).values())
        rounds = max(least, min(most, int(budget / round_takes)))
        times = jobs.measure(dict.fromkeys(plans, rounds))
    return jobs.reports, times


def take_turns(ranks: harness.Ranks, action: Callable[[], object]) -> None:
    """Do the action whenever run_in_turns gives this job a turn, and tell it the seconds, until it gives no more."""
    serve(ranks, lambda _: float(ranks.span(ranks.turn_of(action, 1))))


def serve(ranks: harness.Ranks, do: Callable[[int], float]) -> None:
    """Call `do` on all ranks whenever Jobs gives this job a turn, with what it asks for, until it gives no more.

    What rank 0's call returns is what `Jobs.turn` returns.
    """
    gc.collect()
    gc.disable()
    giver = socket.socket(socket.AF_UNIX) if ranks.rank == 0 else None
    if giver is not None:
        giver.connect(os.environ[harness.TURNS])
        giver.sendall(ANSWER.pack(0))  # ready
    while (asked := ranks.agree(_asked(giver) if giver is not None else 0)) >= 0:
        answer = do(asked)
        if giver is not None:
            giver.sendall(ANSWER.pack(answer))
    if giver is not None:
        giver.close()
    gc.enable()


def _asked(giver: socket.socket) -> int:
    data = giver.recv(ASKED.size)
    return int(ASKED.unpack(data)[0]) if data else -1


class Jobs:
    """One job of `ranks` ranks for each plan, for the time of a `with`, after which `reports` has what they report."""

    def __init__(
        self,
        program: list[str],
        plans: Mapping[str, Any],
        ranks: int,
        *,
        timeout: float,
        mpi: Mapping[str, harness.Mpi] | None = None,
    ) -> None:
        """Say what to run; a plan that `mpi` names has its ranks started by that MPI."""
        self.plans = plans
        self._program, self._ranks = program, ranks
        self._timeout, self._mpi = timeout, mpi or {}
        self._jobs: dict[str, _Job] = {}
        self.reports: dict[str, Any] = {}

    def __enter__(self) -> Jobs:
        with contextlib.ExitStack() as stack:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="turns-"))
            pool = stack.enter_context(ThreadPoolExecutor(len(self.plans)))
            stack.callback(self._end)
            for place, (name, plan) in enumerate(self.plans.items()):
                asks_at = Path(folder) / str(place)
                job = _Job(asks_at, self._timeout)
                self._jobs[name] = job
                arguments = {"mpi": self._mpi.get(name), "timeout": self._timeout, "turns": asks_at}
                job.start(pool, self._program, plan, self._ranks, arguments)
            for job in self._jobs.values():
                job.wait_until_ready()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, error: object, *_: object) -> None:
        with self._stack:
            if error is None:
                self._end()
                self.reports = {name: job.report() for name, job in self._jobs.items()}

    def turn(self, name: str, asked: int = 0) -> float:
        """Let a job do what is asked; return what it says, such as the seconds. RuntimeError if it has ended."""
        return self._jobs[name].turn(asked)

    def warm_up(self, names: Collection[str], asked: int = 0) -> dict[str, float]:
        """Give each job two turns; return for how long it had the second."""
        seconds = {}
        for _ in range(WARM_UP_ROUNDS):
            for name in names:
                start = time.perf_counter()
                self.turn(name, asked)
                seconds[name] = time.perf_counter() - start
        return seconds

    def measure(self, rounds: Mapping[str, int], asked: int = 0) -> dict[str, list[float]]:
        """Give each job its number of turns and return what it said.

        There are as many rounds as the job with most turns has. One with fewer acts in rounds that are spread evenly.
        """
        names, last = list(rounds), max(rounds.values(), default=0)
        times: dict[str, list[float]] = {name: [] for name in names}
        for turn in range(last):
            for name in (names[place] for place in harness.order(len(names), turn)):
                if (turn + 1) * rounds[name] // last > turn * rounds[name] // last:
                    times[name].append(self.turn(name, asked))
        return times

    def _end(self) -> None:
        for job in self._jobs.values():
            job.end()


class _Job:
    """One job, as seen by the process that gives the turns."""

    def __init__(self, asks_at: Path, timeout: float) -> None:
        self._asks_at = str(asks_at)
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(self._asks_at)
        self._socket.listen(2)  # rank 0, and the end of the job
        self._timeout = timeout
        self._socket.settimeout(timeout)

    def start(self, pool: ThreadPoolExecutor, *of: Any) -> None:
        """Let the pool run the job."""
        self._ended: Future[Any] = pool.submit(self._run, *of)

    def _run(self, program: list[str], plan: Any, ranks: int, arguments: dict[str, Any]) -> Any:
        try:
            return harness.run_ranks(program, plan, ranks, **arguments)
        finally:
            # wait_until_ready() must not wait for a job that has ended.
            with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as end:
                end.connect(self._asks_at)

    def wait_until_ready(self) -> None:
        """Return when the job waits for its first turn; RuntimeError where it has ended, or takes too long."""
        try:
            connection, _ = self._socket.accept()
        except TimeoutError:
            raise RuntimeError("a job of the benchmark did not begin in time") from None
        self._socket.close()
        self._socket = connection
        self._socket.settimeout(self._timeout)
        self._receive()

    def turn(self, asked: int) -> float:
        """Let the job do what is asked; return what it says. RuntimeError if it has ended."""
        with contextlib.suppress(OSError):  # it has ended, and _receive() says why
            self._socket.sendall(ASKED.pack(asked))
        return self._receive()

    def _receive(self) -> float:
        try:
            data = self._socket.recv(ANSWER.size)
        except TimeoutError:
            raise RuntimeError("a job of the benchmark did not take its turn in time") from None
        except OSError:
            data = b""
        if len(data) < ANSWER.size:
            self.report()
            raise RuntimeError("a job of the benchmark ended before its turns did")
        return float(ANSWER.unpack(data)[0])

    def end(self) -> None:
        """Let the job end, which it does after the turn under way."""
        self._socket.close()

    def report(self) -> Any:
        """Wait for the job's end and return its report; RuntimeError where it failed."""
        return self._ended.result()
