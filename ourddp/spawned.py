"""Ranks that this process spawns to run a function in a process group of their own.

They meet in a folder, where each leaves what the function returned, so that jobs on one machine share no port.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing import start_processes

LONGEST_WAIT = 3600.0  # seconds; connection.wait() takes no infinity


@dataclass(frozen=True)
class Call:
    """What every rank runs."""

    fn: bytes  #: a pickled function, since it may need another pickler than that of processes
    args: bytes  #: its pickled arguments, a tuple
    ranks: int
    threads: int  #: of each rank
    backend: str
    dumps: Callable[[Any], bytes] = pickle.dumps  #: pickles what the function returns
    keep: int | None = None  #: how many ranks' results are kept; None: all


class SpawnedRanks:
    """Running ranks. Whoever makes them calls stop() in the end."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self._codes: list[int | None] = [None] * call.ranks
        self._folder = tempfile.TemporaryDirectory(prefix="ourddp-ranks-")
        others = multiprocessing.active_children()
        try:
            # If this process dies, torch has the ranks interrupted.
            self._ranks = start_processes(_rank, (call, self._folder.name), call.ranks, join=False)
        except BaseException:  # an interrupt may come between two of them
            _end([process for process in multiprocessing.active_children() if process not in others])
            self._folder.cleanup()
            raise

    def sentinels(self) -> list[int]:
        """Return what connection.wait() needs to notice the end of a rank that the last look() did not."""
        each = zip(self._ranks.processes, self._codes, strict=True)
        return [process.sentinel for process, code in each if code is None]

    def look(self) -> tuple[bool, int | None]:
        """Return whether all ranks have ended well, and the rank that failed first, if one has failed."""
        codes = self._codes = [process.exitcode for process in self._ranks.processes]
        failed = [rank for rank, code in enumerate(codes) if code]
        return not failed and None not in codes, min(failed, key=self._time_of_error, default=None)

    def result(self, rank: int) -> Any:
        """Return what the function returned in a rank that has ended well; RuntimeError if that cannot be read."""
        try:
            return pickle.loads(Path(self._folder.name, f"result-{rank}").read_bytes())
        except Exception as error:  # the rank has called sys.exit(), or unpickling ran what fails here
            raise RuntimeError(f"rank {rank} left no result that can be read: {error!r}") from error

    def describe(self, rank: int) -> str:
        """Return the traceback of a rank that failed, or how it died."""
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

    def _time_of_error(self, rank: int) -> int:
        # A rank that dies leaves no time, but it makes others do so. Otherwise the first error is the cause.
        file = Path(self._folder.name, f"failed-{rank}")
        return int(file.read_text()) if file.exists() else 0


def _end(processes: Iterable[BaseProcess]) -> None:
    for process in processes:
        process.kill()
    for process in processes:
        process.join()


def _rank(rank: int, call: Call, folder: str) -> None:
    """Run the function in one rank. Leave the time if it fails; torch writes the traceback."""
    try:
        _run_in_group(rank, call, folder)
    except Exception:
        # The clock of files is too coarse: peers fail within a millisecond.
        Path(folder, f"failed-{rank}").write_text(str(time.monotonic_ns()))
        raise


def _run_in_group(rank: int, call: Call, folder: str) -> None:
    torch.set_num_threads(call.threads)
    for name in ("RANK", "LOCAL_RANK"):
        os.environ[name] = str(rank)
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        os.environ[name] = str(call.ranks)
    store = dist.FileStore(os.path.join(folder, "store"), call.ranks)
    dist.init_process_group(call.backend, store=store, rank=rank, world_size=call.ranks)
    result = pickle.loads(call.fn)(*pickle.loads(call.args))
    if call.keep is None or rank < call.keep:
        Path(folder, f"result-{rank}").write_bytes(call.dumps(result))
    if dist.is_initialized():  # the function may have left it
        dist.destroy_process_group()
