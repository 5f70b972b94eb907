"""Records a timeline of all ranks, for Perfetto and for ``python -m ourddp report``.

Each machine has one file, to which its ranks append (csrc/common/timeline.h). Here the ranks agree on the files, and
measure how far apart the clocks of their machines are.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist

from ourddp import _C

__all__ = ["timeline"]

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_TEXT_BYTES = 256
_PINGS = 20
# Not empty once this process has made a group whose ranks come by reconfigure().
_come_later: list[bool] = []
_END = '{"ph":"M","name":"process_labels","pid":0,"args":{"labels":"whole"}}\n]\n'


@contextlib.contextmanager
def timeline(path: str | os.PathLike[str], process_group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """Record a timeline of all ranks into the file ``path`` while the block runs; all ranks of the group call it.

    The file opens in https://ui.perfetto.dev and chrome://tracing: forward, backward and each bucket of a
    ``DistributedDataParallel``, each collective with what it waited for, and the bandwidth. ``python -m ourddp report``
    sums it up. Each rank appends to it several times a second, so it can be read whenever the job ends.

    The ranks of one machine share the file. If the group has several machines, those after the first write to
    ``NAME.node1.EXTENSION`` and so on, each in its own file system, with times by the first machine's clock.
    ``OURS_TIMELINE=path`` does the same for a whole job, from the first group of all ranks on.

    Raises:
        ValueError: If a timeline is being recorded already.
        RuntimeError: On all ranks, if one of them cannot write the file.

    """
    group = process_group if process_group is not None else dist.group.WORLD
    if group is None:
        raise RuntimeError("a timeline needs a process group: call ourddp.init() first")
    backend = group._get_backend(torch.device("cpu"))
    file = _start(backend, Path(path))
    try:
        yield
    finally:
        _C.stop_timeline()
    backend.barrier().wait()
    if file is not None:
        with file.open("a") as whole:
            whole.write(_END)


def start_as_asked(backend: dist.Backend, *, ranks_come_later: bool) -> None:
    """Start the timeline that OURS_TIMELINE asks for with the first group of all ranks, since they all know of it.

    A process that has made a group whose ranks come by reconfigure() starts none: the others may record already.
    """
    path = _C.option_values()["OURS_TIMELINE"]
    if ranks_come_later:
        _come_later.append(True)
    has_all = not dist.is_initialized() or backend.size() == dist.get_world_size()
    if path and has_all and not _come_later and not _C.timeline_is_on():
        _start(backend, Path(path))


def _start(backend: dist.Backend, path: Path) -> Path | None:
    """Start to record. Return the file on the rank that has made it."""
    rank = backend.rank()
    if _C.timeline_is_on():
        raise ValueError("a timeline is being recorded already; stop that one first")
    machines = _gather(backend, _machine())
    nodes = list(dict.fromkeys(machines))
    node = nodes.index(machines[rank])
    file = path if node == 0 else path.with_name(f"{path.stem}.node{node}{path.suffix}")
    makes = machines.index(machines[rank]) == rank
    failure = ""
    if makes:
        try:
            file.write_text("[\n")
        except OSError as error:
            failure = str(error)
    offset = _offset(backend, machines)
    _raise_on_all(backend, path, failure)
    try:
        _C.start_timeline(str(file), rank, offset)
    except RuntimeError as error:  # containers and users may share a machine, but not the file
        failure = str(error)
    try:
        _raise_on_all(backend, path, failure)
    except RuntimeError:
        _C.stop_timeline()
        raise
    return file if makes else None


def _raise_on_all(backend: dist.Backend, path: Path, failure: str) -> None:
    for rank, text in enumerate(_gather(backend, failure)):
        if text:
            raise RuntimeError(f"the timeline cannot be written to {path}: rank {rank}: {text}")


def _machine() -> str:
    """Return what is equal on ranks with one clock and, most likely, one file system."""
    boot = _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else ""
    return boot or os.uname().nodename


def _gather(backend: dist.Backend, text: str) -> list[str]:
    """Return the texts of all ranks, as far as they fit."""
    mine = torch.zeros(_TEXT_BYTES, dtype=torch.uint8)
    data = text.encode()[:_TEXT_BYTES]
    mine[: len(data)] = torch.tensor(list(data), dtype=torch.uint8)
    all_of_them = [torch.empty_like(mine) for _ in range(backend.size())]
    backend.allgather([all_of_them], [mine]).wait()
    return [bytes(one.tolist()).rstrip(b"\0").decode(errors="replace") for one in all_of_them]


def _offset(backend: dist.Backend, machines: list[str]) -> int:
    """Return how many nanoseconds this machine's clock is ahead of rank 0's.

    The answer that took the least time tells most exactly, to half of that time (Cristian, 1989).
    """
    rank, result = backend.rank(), 0
    clock = torch.zeros(1, dtype=torch.int64)
    for other, machine in enumerate(machines):
        if machine == machines[0] or rank not in (0, other):
            continue
        best = float("inf")
        for _ in range(_PINGS):
            if rank == 0:
                backend.recv([clock], other, 0).wait()
                clock[0] = time.monotonic_ns()
                backend.send([clock], other, 0).wait()
                continue
            before = time.monotonic_ns()
            backend.send([clock], 0, 0).wait()
            backend.recv([clock], 0, 0).wait()
            after = time.monotonic_ns()
            if after - before < best:
                best = after - before
                result = (before + after) // 2 - int(clock.item())
    return result
