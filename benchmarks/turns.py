"""Jobs that each have processes of their own, run side by side and take turns.

`run_in_turns(__file__, plans, ...)` starts one job of ranks for each plan; there the file works inside `with
Ranks() as ranks`, as under `harness.run_ranks`, and ends with `ranks.take_turns(action)`. So all jobs see the same
machine at the same time, and none sees what another leaves behind in a process: its allocator's free lists, say.
"""

from __future__ import annotations

import socket
import struct
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import harness

WARM_UPS = 2  # rounds
SECONDS = struct.Struct("d")


def run_in_turns(
    script: str, plans: dict[str, Any], ranks: int, *, budget: float, least: int, most: int, timeout: float
) -> tuple[dict[str, Any], dict[str, list[float]]]:
    """Run a job of `ranks` ranks for each plan, in turns, and return every job's report and its seconds.

    In a turn a job acts twice, and the second time is timed, as in `Ranks.measure`. There are `least` to `most` rounds:
    as many as fit into `budget` seconds going by the second of two warm-up rounds. Raises RuntimeError where a rank
    fails or `timeout` seconds pass; no rank is left behind.
    """
    with ThreadPoolExecutor(len(plans)) as pool:
        jobs = {name: _Job(pool, script, plan, ranks, timeout) for name, plan in plans.items()}
        try:
            for job in jobs.values():
                job.receive()  # it is ready
            for _ in range(WARM_UPS):
                start = time.perf_counter()
                for job in jobs.values():
                    job.turn()
                seconds = time.perf_counter() - start
            rounds = max(least, min(most, int(budget / seconds)))
            names = list(jobs)
            times: dict[str, list[float]] = {name: [] for name in names}
            for turn in range(rounds):
                for place in range(len(names)):
                    name = names[(turn + place) % len(names)]  # nobody always comes after the same other
                    times[name].append(jobs[name].turn())
        finally:
            for job in jobs.values():
                job.end()
        return {name: job.report() for name, job in jobs.items()}, times


class _Job:
    """One job, seen by who gives the turns."""

    def __init__(self, pool: ThreadPoolExecutor, script: str, plan: Any, ranks: int, timeout: float) -> None:
        self._socket, theirs = socket.socketpair()
        self._socket.settimeout(timeout)
        self._ended: Future[Any] = pool.submit(self._run, theirs, script, plan, ranks, timeout)

    @staticmethod
    def _run(theirs: socket.socket, script: str, plan: Any, ranks: int, timeout: float) -> Any:
        with theirs:
            return harness.run_ranks(script, plan, ranks, mpi=False, timeout=timeout, turns=theirs)

    def turn(self) -> float:
        """Let the job act; return the seconds that its slowest rank took."""
        self._socket.sendall(b"t")
        return self.receive()

    def receive(self) -> float:
        """Wait for the job's next number; RuntimeError where it has ended."""
        data = self._socket.recv(SECONDS.size, socket.MSG_WAITALL)
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
