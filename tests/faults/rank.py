"""The process of a rank: does one job after another, and reports how each ended."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import gc
import multiprocessing.connection
import os
import signal
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from hosts import Host

from faults import surroundings
from faults.job import Job, LeftError, run
from faults.page import Page


@dataclass
class Report:
    """How a job ended on one rank."""

    rank: int
    outcome: str  # "right"; "error": a group failed; "wrong": a result was; "broken": anything else
    text: str = ""  # the error
    raised_at: float = 0  # by the monotonic clock


def possessions() -> Counter[str]:
    """Return the descriptors, the shared memory, the threads and the children of this process, by kind."""
    gc.collect()
    found: Counter[str] = Counter()
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            found["descriptor of " + os.readlink(entry).split(":[")[0].split(" ")[0]] += 1
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "/memfd:ours" in line:
            found["mapping of " + line.split("/memfd:")[1].split()[0]] += 1
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):
            found["thread " + (task / "comm").read_text().strip()] += 1
            found["child process"] += len((task / "children").read_text().split())
    return found


def _attempt(job: Job, page: Page) -> Report:
    report = Report(job.rank, "right")
    try:
        run(job, page)
    except LeftError:
        raise
    except AssertionError as error:
        report.outcome, report.text = "wrong", str(error)
    except dist.DistError as error:
        report.outcome, report.text = "error", str(error)
    except Exception as error:
        report.outcome, report.text = "broken", f"{type(error).__name__}: {error}"
    report.raised_at = time.monotonic()
    page.doing = "destroy"
    if dist.is_initialized():
        dist.destroy_process_group()
    # torch counts the default groups that could not be made, too, so the keys of the next one would differ among ranks.
    dist.distributed_c10d._world.group_count = 0
    return report


def serve(
    pipe: multiprocessing.connection.Connection, page: Path, stacks: Path, host: Host | None, around: str
) -> None:
    """Do the jobs that come through ``pipe`` until it closes. ``around`` is a name in surroundings.SURROUNDINGS.

    A message is a job and what to add to the environment, or None, which asks what this process has.
    """
    torch.set_num_threads(1)
    # The warnings of groups that fail on purpose, and the stacks of a rank that hangs.
    with stacks.open("w") as file:
        os.dup2(file.fileno(), sys.stderr.fileno())
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    if host is not None:
        host.enter()
    surroundings.SURROUNDINGS[around]()
    own = Page(page)
    with contextlib.suppress(EOFError):
        while True:
            message = pipe.recv()
            if message is None:
                pipe.send(possessions())
                continue
            job, environment = message
            os.environ.update(environment)
            try:
                pipe.send(_attempt(job, own))
            except LeftError:
                # What the end of a program with an exception comes to.
                atexit._run_exitfuncs()
                ctypes.CDLL(None).exit(1)
    os._exit(0)
