"""How well the error of a timeout says where the late rank is, and how long after the timeout it comes.

    torchrun --nproc_per_node=4 benchmarks/roll_call.py --trials 100

In each trial one rank, each in its turn, sleeps, waits for a lock, computes without end, or is stopped by SIGSTOP; the
others call all_reduce in a new group meanwhile. A trial is right if the errors of all ranks name the file and line at
which the late rank is, or say that it is stopped, and those of the waiting ranks come within 0.5 s of the timeout.
"""

from __future__ import annotations

import argparse
import datetime
import os
import re
import signal
import statistics
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

import ourddp

LATENESS = 1.0  # seconds after the timeout, in which the others have to get their errors


def sleep(until: float) -> None:
    """Be late by sleeping."""
    time.sleep(until - time.monotonic())  # late here


def wait_for_lock(until: float) -> None:
    """Be late because a lock is held."""
    lock = threading.Lock()
    with lock:
        lock.acquire(timeout=until - time.monotonic())  # late here


def compute(until: float) -> None:
    """Be late because of a computation."""
    while time.monotonic() < until:  # late here
        pass  # late here


def stop(until: float) -> None:
    """Be late because of SIGSTOP; the next rank sends SIGCONT."""
    del until
    os.kill(os.getpid(), signal.SIGSTOP)


HOW: dict[str, Callable[[float], None]] = {"sleep": sleep, "lock": wait_for_lock, "loop": compute, "stop": stop}


def places() -> dict[str, str]:
    """Return for each way of being late a pattern for what the error has to say."""
    patterns = {"stop": r"is stopped \(SIGSTOP"}
    lines = Path(__file__).read_text().splitlines()
    late = [number for number, line in enumerate(lines, 1) if line.endswith("# late here")]
    for name, function in HOW.items():
        code = function.__code__
        own = [str(number) for number in late if 0 < number - code.co_firstlineno < 8]
        patterns.setdefault(name, rf"is at {re.escape(__file__)}:({'|'.join(own)}) in {code.co_name}\b")
    return patterns


def attempt(name: str, victim: int, timeout: float) -> tuple[str, float]:
    """Let one rank be late. Return the error that this rank gets, and how long after the timeout it came."""
    store = dist.distributed_c10d._get_default_store()
    rank, world = dist.get_rank(), dist.get_world_size()
    group = dist.new_group()
    assert group is not None
    dist.all_reduce(torch.ones(4), group=group)
    group._get_backend(torch.device("cpu")).set_timeout(datetime.timedelta(seconds=timeout))
    store.set(f"pid {victim}", str(os.getpid())) if rank == victim else None
    dist.barrier()
    begin = time.monotonic()
    if rank == victim:
        HOW[name](begin + timeout + LATENESS)
    error, seconds = "", 0.0
    try:
        dist.all_reduce(torch.ones(4), group=group)
    except dist.DistBackendError as raised:
        error, seconds = str(raised), time.monotonic() - begin - timeout
    if name == "stop" and rank == (victim + 1) % world:
        os.kill(int(store.get(f"pid {victim}")), signal.SIGCONT)
    dist.barrier()
    dist.destroy_process_group(group)
    return error, 0.0 if rank == victim else seconds


def main() -> int:
    """Make the trials, and print a line for each way of being late. Return 1 if less than 99 % were right."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=10, help="of each kind")
    parser.add_argument("--timeout", type=float, default=0.3, help="of the late call, in seconds")
    parser.add_argument(
        "--limit", type=float, default=0.5, help="seconds after the timeout in which errors have to come"
    )
    chosen = parser.parse_args()
    launch = ourddp.init()
    patterns = places()
    good = True
    for name in HOW:
        right, times, wrong = 0, [], ""
        for trial in range(chosen.trials):
            mine = attempt(name, trial % launch.world_size, chosen.timeout)
            all_of_them: list[tuple[str, float]] = [mine] * launch.world_size
            dist.all_gather_object(all_of_them, mine)
            slowest = max(seconds for _, seconds in all_of_them)
            named = all(re.search(patterns[name], error) for error, _ in all_of_them)
            times.append(slowest)
            if named and slowest < chosen.limit:
                right += 1
            else:
                wrong = f"after {slowest:.3f} s: {all_of_them[0][0]}"
        good = good and right >= 0.99 * chosen.trials
        if launch.rank == 0:
            late = f"{statistics.median(times) * 1e3:.0f} ms after the timeout (median; at most {max(times) * 1e3:.0f})"
            print(f"{name:5}  right {right} of {chosen.trials}, {late}", *([wrong] if wrong else []), sep="\n  ")
            sys.stdout.flush()
    dist.destroy_process_group()
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
