"""What a process has, in numbers, and a rank that counts it while it does something again and again."""

from __future__ import annotations

import ctypes
import gc
import sys
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist
from own_pages import pages

from faults.loads import Load
from faults.rank import possessions

# Threads tell latecomers for three seconds that a rank has left a group.
PATIENCE_S = 6.0


class _Mallinfo(ctypes.Structure):
    _names = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")
    _fields_ = [(name, ctypes.c_size_t) for name in _names]


def _bytes_from_malloc() -> int:
    """Return the bytes that the C library has given out; 0 before glibc 2.33, which cannot tell."""
    mallinfo = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if mallinfo is None:
        return 0
    mallinfo.restype = _Mallinfo
    info = mallinfo()
    return info.uordblks + info.hblkhd


@dataclass
class Sample:
    """What a process has after ``steps`` steps."""

    steps: int
    counts: Counter[str]  # descriptors, threads and the like, of which every one counts
    amounts: dict[str, int]  # of what comes and goes a little


def amounts() -> dict[str, int]:
    """Return the memory and the mappings of this process."""
    gc.collect()
    resident = pages()
    return {
        "malloc": _bytes_from_malloc(),
        "own memory": resident["RssAnon"],
        "shared memory": resident["RssShmem"],
        "objects": sys.getallocatedblocks(),
        "mappings": Path("/proc/self/maps").read_bytes().count(b"\n"),
    }


def settled(usual: Counter[str], patience: float) -> Counter[str]:
    """Return the possessions of this process once they are not more than ``usual``, or when ``patience`` is over."""
    deadline = time.monotonic() + patience
    while (found := possessions()) - usual and time.monotonic() < deadline:
        time.sleep(0.02)
    return found


def least(seconds: float) -> Counter[str]:
    """Return the least that this process has of each kind in so much time."""
    found, end = possessions(), time.monotonic() + seconds
    while time.monotonic() < end:
        time.sleep(0.02)
        found &= possessions()
    return found


def watch(rank: int, world: int, load: Load, steps: Iterable[int], patience: float = PATIENCE_S) -> list[Sample]:
    """Run a load, and take a sample after each number in ``steps``."""
    step = load(rank, world)
    samples: list[Sample] = []
    gc.freeze()  # what torch has loaded is a million objects, and looking through them takes seconds
    done, usual = 0, None  # the least of each kind so far
    for until in steps:
        for number in range(done, until):
            step(number)
        done = until
        dist.barrier()
        counts = least(patience) if usual is None else settled(usual, patience)
        usual = counts if usual is None else usual & counts
        samples.append(Sample(done, counts, amounts()))
        dist.barrier()
    return samples
