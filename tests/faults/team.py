"""The processes of a job's ranks, which outlive jobs; those that have died are replaced."""

from __future__ import annotations

import contextlib
import multiprocessing.connection
import os
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch.distributed as dist
from ranks import Nodes, count_of, fork_server, make_store, node_ids

from faults import rank as rank_process
from faults import surroundings
from faults.job import Job
from faults.page import Page
from faults.rank import Report


class Team:
    """``world`` processes on ``nodes`` (see ranks.py), in the surroundings ``around``."""

    def __init__(self, world: int, nodes: Nodes, around: str = surroundings.NONE) -> None:
        self.world, self.nodes = world, nodes
        self._around = around
        self._store, self._address = make_store(nodes)
        self._folder = tempfile.TemporaryDirectory(prefix="faults-")
        self.pages = [Page(self._file("page", rank)) for rank in range(world)]
        self._processes: list[Any] = [None] * world
        self._pipes: list[Any] = [None] * world

    def _file(self, kind: str, rank: int) -> Path:
        return Path(self._folder.name) / f"{kind}-{rank}"

    @property
    def store(self) -> tuple[str, int]:
        """The address of the store that serves all jobs."""
        return self._address, self._store.port

    def host_of(self, rank: int) -> Any:
        """Return the host of a rank; None if all ranks are on this one."""
        return None if isinstance(self.nodes, int) else self.nodes[self.node_of(rank)]

    def node_of(self, rank: int) -> int:
        """Return the number of the node of a rank."""
        return rank * count_of(self.nodes) // self.world

    def pid(self, rank: int) -> int:
        """Return the process id of a rank."""
        return self._processes[rank].pid

    def complete(self) -> None:
        """Start the processes that do not run."""
        for rank, process in enumerate(self._processes):
            if process is None or not process.is_alive():
                self._start(rank)

    def _start(self, rank: int) -> None:
        if self._pipes[rank] is not None:
            self._pipes[rank].close()
        ours, theirs = fork_server().Pipe()
        files = self._file("page", rank), self._file("stacks", rank)
        arguments = (theirs, *files, self.host_of(rank), self._around)
        process = fork_server().Process(target=rank_process.serve, args=arguments, name=f"rank {rank}", daemon=True)
        process.start()
        theirs.close()
        self._processes[rank], self._pipes[rank] = process, ours

    def begin(self, jobs: dict[int, Job]) -> None:
        """Let ranks begin their jobs, by rank of the team; a job may call them otherwise."""
        ids = node_ids(self.world, count_of(self.nodes))
        for rank, job in jobs.items():
            self.pages[rank].ends, self.pages[rank].hit_at, self.pages[rank].doing = False, 0, ""
            environment = {"MASTER_ADDR": job.store[0], "MASTER_PORT": str(job.store[1]), **ids[rank]}
            self._pipes[rank].send((job, environment))

    def collect(self, ranks: Collection[int], deadline: float) -> dict[int, Report | None]:
        """Wait for the reports of ``ranks``. One that has died has None; one that has not ended is not there."""
        reports: dict[int, Report | None] = {}
        waiting = {self._pipes[rank]: rank for rank in ranks}
        while waiting:
            ready = multiprocessing.connection.wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for pipe in ready:
                rank = waiting.pop(pipe)  # type: ignore[index]
                reports[rank] = None
                with contextlib.suppress(EOFError, OSError):
                    reports[rank] = self._pipes[rank].recv()
                if reports[rank] is None:
                    self._processes[rank].join(5)
        return reports

    def possessions(self, ranks: Collection[int]) -> list[Counter[str]]:
        """Return what the processes of ``ranks`` have, which do no job now."""
        for rank in ranks:
            self._pipes[rank].send(None)
        for rank in ranks:
            assert self._pipes[rank].poll(60), f"rank {rank} hangs outside a job:\n{self.stack(rank)}"
        return [self._pipes[rank].recv() for rank in ranks]

    def stack(self, rank: int) -> str:
        """Return what a rank that hangs is doing, as far as Python knows."""
        os.kill(self.pid(rank), signal.SIGUSR1)
        time.sleep(0.5)
        return self._file("stacks", rank).read_text()[-4000:]

    def kill(self, ranks: Collection[int]) -> None:
        """Kill processes and wait for their end."""
        for rank in ranks:
            if self._processes[rank] is not None:
                self._processes[rank].kill()
        for rank in ranks:
            if self._processes[rank] is not None:
                self._processes[rank].join()

    def close(self) -> None:
        """End all processes."""
        self.kill(range(self.world))
        for pipe in self._pipes:
            if pipe is not None:
                pipe.close()
        self._store = None
        self._folder.cleanup()


class StoreProcess:
    """A process that serves a store of its own."""

    def __init__(self) -> None:
        self._pipe, theirs = fork_server().Pipe()
        self._process = fork_server().Process(target=_serve_store, args=(theirs,), name="store", daemon=True)
        self._process.start()
        theirs.close()
        self.address = "127.0.0.1", self._pipe.recv()

    def send_signal(self, number: int) -> None:
        """Send the process a signal."""
        os.kill(self._process.pid, number)

    def close(self) -> None:
        """End the process, even if it is stopped."""
        self._process.kill()
        self._process.join()
        self._pipe.close()


def _serve_store(pipe: multiprocessing.connection.Connection) -> None:
    """Serve a store until ``pipe`` closes; send its port first."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipe.send(store.port)
    with contextlib.suppress(EOFError):
        pipe.recv()
    os._exit(0)
