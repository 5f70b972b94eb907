"""Starts commands side by side as the ranks of a job on this machine, and leaves none behind."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence

import torch.distributed as dist

GRACE = 10.0  # seconds that the other ranks have to end by themselves after one of them failed
TO_END = 5.0  # seconds between asking a process to end, and killing it
MOST_STARTED = 8  # ranks that a command starts unless it is told how many


def cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0))


def default_ranks() -> int:
    """Return how many ranks a command starts here unless it is told: one for each core, 2 to MOST_STARTED."""
    return min(MOST_STARTED, max(2, cores()))


def threads_for(ranks: int) -> int:
    """Return each rank's share of the cores, at least 1, which is what OMP_NUM_THREADS should be."""
    return max(1, cores() // ranks)


def run_ranks(command: Sequence[str], ranks: int, each: Sequence[Mapping[str, str]] | None = None) -> int:
    """Run ``command`` in ``ranks`` processes, which find torchrun's variables in their environment, at a free port.

    ``each`` has what to add to the environment of each rank. Returns 0 when all have ended well, otherwise 1.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    job = {
        "OMP_NUM_THREADS": str(threads_for(ranks)),
        **os.environ,
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the store's server is here
    }
    environments = [
        {**job, "RANK": str(rank), "LOCAL_RANK": str(rank), **(each[rank] if each else {})} for rank in range(ranks)
    ]
    return 1 if any(run_all([command] * ranks, environments)) else 0


def run_all(
    commands: Sequence[Sequence[str]],
    environments: Sequence[Mapping[str, str]],
    *,
    grace: float = GRACE,
    timeout: float = math.inf,
) -> list[int | None]:
    """Run commands side by side, each with its environment, and return their exit codes when all have ended.

    After one has failed, the others have ``grace`` seconds. What still runs then, or after ``timeout`` seconds, is
    ended and has the code None. An interrupt is this process's alone, which ends the others. After SIGTERM, unless the
    program handles it, they are ended as well, and then this process by SystemExit.
    """
    processes: list[subprocess.Popen[bytes]] = []
    limit = time.monotonic() + timeout
    with _termination_noted() as to_terminate:
        try:
            with _interrupts_ignored():
                for command, environment in zip(commands, environments, strict=True):
                    processes.append(subprocess.Popen(command, env=environment))
            failed = False
            while True:
                codes = [process.poll() for process in processes]
                if any(codes) and not failed:
                    failed, limit = True, min(limit, time.monotonic() + grace)
                if None not in codes or time.monotonic() > limit or to_terminate:
                    return codes
                time.sleep(0.02)
        finally:
            with _interrupts_ignored():  # a second one would leave some behind
                _end(processes)


@contextlib.contextmanager
def _termination_noted() -> Iterator[list[int]]:
    """Put SIGTERM into the list instead of dying of it, and exit in the end. Only the main thread can."""
    noted: list[int] = []
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield noted
        return
    signal.signal(signal.SIGTERM, lambda number, _: noted.append(number))
    try:
        yield noted
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if noted:
            sys.exit(128 + noted[0])


@contextlib.contextmanager
def _interrupts_ignored() -> Iterator[None]:
    """Let processes that are started meanwhile ignore interrupts. Only the main thread can, and others get none."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        process.terminate()
    deadline = time.monotonic() + TO_END
    for process in processes:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
