"""Ranks for a benchmark: starts them, lets them set off together, times what they do.

`run_ranks(["-m", module], plan, ...)` runs a program in every rank, which works inside `with StartedRanks() as ranks`.
The plan, any JSON value, reaches every rank, and what rank 0 puts into `ranks.report` comes back as the result.
"""

from __future__ import annotations

import datetime
import gc
import json
import mmap
import os
import platform
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ourddp import processes

FOLDER = "OURS_BENCHMARK_FOLDER"  # where a rank finds plan, rendezvous file and pace file
TURNS = "OURS_BENCHMARK_TURNS"  # the socket at which a job's rank 0 asks for its turns
TIMEOUT = datetime.timedelta(seconds=300)  # of every single operation; jobs that take turns wait for one
CACHE_LINE = 64
MPI_OPTIONS = ("--allow-run-as-root", "--oversubscribe", "--bind-to", "none")


def machine() -> str:
    """Return a description of this machine that names no host, as "2-core x86_64 (AMD EPYC, 32 MiB of L3)"."""
    return f"{processes.cores()}-core {platform.machine()}{_processor()}"


def _processor() -> str:
    """Return in brackets what the system says about the processor, or an empty string if it says nothing."""
    facts = re.findall(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)[:1]
    for cache in Path("/sys/devices/system/cpu/cpu0/cache").glob("index3"):
        kibibytes = int((cache / "size").read_text().strip().removesuffix("K"))
        facts.append(f"{kibibytes / 1024:g} MiB of L3")
    return f" ({', '.join(facts)})" if facts else ""


def find_mpirun() -> str | None:
    """Return the path of Open MPI's mpirun, for mpi4py; None if either is missing, or mpirun is another MPI's."""
    try:
        import mpi4py  # noqa: F401
    except ImportError:
        return None
    beside_python = Path(sys.executable).with_name("mpirun")
    found = str(beside_python) if beside_python.exists() else shutil.which("mpirun")
    if found is None:
        return None
    # MPI_OPTIONS are those of Open MPI.
    said = subprocess.run([found, "--version"], capture_output=True, text=True, check=False).stdout
    return found if "Open MPI" in said or "OpenRTE" in said else None


@dataclass(frozen=True)
class Mpi:
    """How an MPI starts ranks: its command up to their number, and what their environment needs."""

    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)


def open_mpi(ranks: int) -> Mpi:
    """Return how the Open MPI that find_mpirun has found starts that many ranks."""
    # Open MPI yields while it waits if it knows that ranks share cores; it is told, and not left to guess.
    shared = ranks > processes.cores()
    return Mpi((str(find_mpirun()), *MPI_OPTIONS), {"OMPI_MCA_mpi_yield_when_idle": "1" if shared else "0"})


def order(count: int, turn: int) -> list[int]:
    """Return 0 to count - 1 in an order that depends on the turn, so that none always comes after the same other."""
    return random.Random(turn).sample(range(count), count)


def read_plan() -> Any:
    """Return the plan that run_ranks gave this rank."""
    return json.loads((Path(os.environ[FOLDER]) / "plan.json").read_text())


def run_ranks(
    program: list[str], plan: Any, ranks: int, *, mpi: Mpi | None = None, timeout: float, turns: Path | None = None
) -> Any:
    """Run Python with the arguments `program` in `ranks` processes with `plan` and return rank 0's report.

    With `mpi` it starts them, so that they can use it too. `turns` is for turns.Jobs. Raises RuntimeError if a rank
    fails or `timeout` seconds pass; no rank is left behind.
    """
    with tempfile.TemporaryDirectory(prefix="benchmark-") as name:
        folder = Path(name)
        (folder / "plan.json").write_text(json.dumps(plan))
        (folder / "pace").write_bytes(bytes(ranks * CACHE_LINE))
        environment = {**os.environ, FOLDER: name, "OMP_NUM_THREADS": "1"}
        if turns is not None:
            environment[TURNS] = str(turns)
        command = [sys.executable, *program]
        if mpi:
            commands = [[*mpi.command, "-n", str(ranks), *command]]
            environments = [{**environment, **mpi.environment}]
        else:
            commands = [command] * ranks
            environments = [{**environment, "RANK": str(rank), "WORLD_SIZE": str(ranks)} for rank in range(ranks)]
        codes = processes.run_all(commands, environments, grace=0, timeout=timeout)
        failed = next((code for code in codes if code), None)
        if failed is not None:
            raise RuntimeError(f"a rank of the benchmark ended with status {failed}: its own message is above")
        if None in codes:
            raise RuntimeError(f"the benchmark did not end within {timeout:.0f} s: run fewer sizes or repetitions")
        return json.loads((folder / "report.json").read_text())


class Ranks:
    """One rank's side of a benchmark: its number, its groups, and the pace that all ranks keep.

    The default process group is Gloo's and only controls; what is measured has groups of its own from `group`.
    """

    def __init__(self, rank: int, size: int) -> None:
        """Take the number of this rank, and how many there are. A subclass joins them and sets ``plan``."""
        self.rank, self.size = rank, size
        self.plan: Any = None
        self._turn = 0
        torch.set_num_threads(1)

    def open_pace(self, folder: Path) -> None:
        """Map the page that all ranks of this machine share."""
        with (folder / "pace").open("r+b") as file:
            self._pace = memoryview(mmap.mmap(file.fileno(), 0)).cast("q")

    def group(self, backend: str) -> dist.ProcessGroup:
        """Return a new group of all ranks; ValueError if this torch does not know the backend."""
        group = dist.new_group(backend=backend, timeout=TIMEOUT)
        assert group is not None
        return group

    def agree(self, number: int) -> int:
        """Return rank 0's `number` on every rank."""
        box = torch.tensor([number])
        dist.broadcast(box, src=0)
        return int(box)

    def together(self) -> None:
        """Return when every rank has called it, all of them within a few microseconds.

        It uses none of the backends that are measured: each rank counts its turns in a shared page. A rank that waits
        long sleeps first, so that it takes no core from a rank that still works; a second round, in which all ranks are
        awake and yield, makes them set off together.
        """
        self._wait_for_all(sleep_after=1e-4)
        self._wait_for_all(sleep_after=TIMEOUT.total_seconds())

    def _wait_for_all(self, sleep_after: float) -> None:
        self._turn += 1
        pace, stride, turn = self._pace, CACHE_LINE // 8, self._turn
        pace[self.rank * stride] = turn
        start = time.perf_counter()
        for place in range(0, self.size * stride, stride):
            while pace[place] < turn:
                os.sched_yield()
                waited = time.perf_counter() - start
                if waited > TIMEOUT.total_seconds():
                    raise RuntimeError(f"rank {place // stride} has not come for {waited:.0f} s: it hangs or has died")
                if waited > sleep_after:
                    time.sleep(1e-4)

    def measure(
        self,
        actions: dict[str, Callable[[], object]],
        *,
        budget: float,
        least: int,
        most: int,
        burst: int = 1,
        refresh: Callable[[str], object] | None = None,
    ) -> dict[str, list[float]]:
        """Time the actions in turn, round after round, and return the seconds of each action in every round.

        All ranks set off together and do the same action; `span` says how long that takes. What is timed are `burst`
        calls in a row, of which the mean counts, after one that is not timed; with a burst of 0 it is that one call,
        which finds the caches full of other things. There are `least` to `most` rounds: as many as fit into `budget`
        seconds going by the second of two warm-up rounds. `refresh`, where given, is called with the action's name
        before every turn, outside the time.
        """

        def turn_of(name: str) -> torch.Tensor:
            if refresh is not None:
                refresh(name)
            return self.turn_of(actions[name], burst)

        for _ in range(2):
            start = time.perf_counter()
            for name in actions:
                turn_of(name)
            seconds = time.perf_counter() - start
        rounds = self.agree(max(least, min(most, int(budget / (seconds + 1e-9)))))
        names = list(actions)
        times = torch.empty(len(names), rounds, 2, dtype=torch.float64)
        gc.collect()
        gc.disable()
        for turn in range(rounds):
            for column in order(len(names), turn):
                times[column, turn] = turn_of(names[column])
        gc.enable()
        seconds = self.span(times) / max(1, burst)
        return {name: seconds[column].tolist() for column, name in enumerate(names)}

    def span(self, turns: torch.Tensor) -> torch.Tensor:
        """Return the seconds of turns, given what `turn_of` returned for each in the last dimension, on every rank.

        A turn lasts from the start of the last rank to begin until the end of the last to end, by the clock that all
        processes of a machine share: where ranks share cores, when each begins is the scheduler's doing.
        """
        dist.all_reduce(turns, dist.ReduceOp.MAX)
        return turns[..., 1] - turns[..., 0]

    def turn_of(self, action: Callable[[], object], burst: int) -> torch.Tensor:
        """Do the action `burst` times in a row, but once without a warm-up where that is 0; return start and end."""
        if burst:
            action()
        self.together()
        start = time.perf_counter()
        for _ in range(max(1, burst)):
            action()
        return torch.tensor([start, time.perf_counter()], dtype=torch.float64)


class StartedRanks(Ranks):
    """One rank of those that run_ranks has started. What rank 0 puts into ``report`` is what run_ranks returns."""

    def __init__(self) -> None:
        """Find the others, as run_ranks' environment says."""
        # MPI's names first: an outer job's RANK may be in the environment that mpirun hands down.
        rank = int(_first_of("OMPI_COMM_WORLD_RANK", "PMI_RANK", "RANK"))
        size = int(_first_of("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "WORLD_SIZE"))
        super().__init__(rank, size)
        os.environ.update(LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(size))
        self._folder = Path(os.environ[FOLDER])
        self.plan = read_plan()
        self.report: Any = None
        self.open_pace(self._folder)

    def __enter__(self) -> StartedRanks:
        store = dist.FileStore(str(self._folder / "rendezvous"), self.size)
        dist.init_process_group("gloo", store=store, rank=self.rank, world_size=self.size, timeout=TIMEOUT)
        return self

    def __exit__(self, error: object, *_: object) -> None:
        if error is None:
            if self.rank == 0:
                (self._folder / "report.json").write_text(json.dumps(self.report))
            dist.barrier()
            dist.destroy_process_group()


def _first_of(*names: str) -> str:
    """Return the first of these variables that the environment has."""
    return next(os.environ[name] for name in names if name in os.environ)
