"""Measures which algorithm is the fastest between the nodes of a job, and writes a table that ``OURS_SELECT`` reads.

``torchrun ... -m ourddp tune`` runs it on the nodes of a job. ``python -m ourddp tune --ranks 4`` starts ranks that
play nodes on one machine, which is good for a try but not for a table.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ourddp import _C, joining, processes
from ourddp.algorithm_table import ALGORITHMS, Measurement, choose, describe, table
from ourddp.progress import Progress

HELP = "measure the algorithms between nodes, and write a table"
LEAST_BYTES = 1 << 10
LEAST_ROUNDS, MOST_ROUNDS = 6, 100
MOST_SENT = 32 << 20  # bytes that a rank may send where it sends everything to all others; beyond, that is never best


class TuneError(RuntimeError):
    """Nothing can be measured, or the table cannot be written; the message says what to do."""


def tune(output: Path, budget: float, most_bytes: int, *, progress: bool = False) -> list[Measurement]:
    """Measure all_reduce on the default group, write the table to ``output`` on rank 0, and return what was measured.

    Every rank calls it. It may take ``budget`` seconds, and the largest array has ``most_bytes``. With ``progress``
    rank 0 shows on stderr how far it is. Raises TuneError on all ranks if all are on one node, if ``output`` cannot be
    written, or if the time is too short for the smallest array.
    """
    deadline = time.monotonic() + budget
    group = dist.distributed_c10d._get_default_group()._get_backend(torch.device("cpu"))
    if not isinstance(group, _C.ProcessGroupOurs):
        raise TuneError("only groups of the backend 'ours' can be tuned")
    sizes = group.node_sizes()
    if len(sizes) < 2:
        raise TuneError(
            f"all {dist.get_world_size()} ranks are on one node, and the table is about nodes: "
            "start the ranks on several, or let them play nodes with --ranks 4 --nodes 2"
        )
    _agree(_unwritable(output) if dist.get_rank() == 0 else "")
    nodes, local = len(sizes), max(sizes)
    shown = Progress(sys.stderr if progress and dist.get_rank() == 0 else None)
    found = _measure_all(nodes, local, deadline, most_bytes, shown)
    if not found:
        raise TuneError(f"{budget:g} s are not enough to measure anything: give more with --time-budget")
    text = table(found, nodes, local)
    _agree(_write(output, text) if dist.get_rank() == 0 else "")
    return found


# --- measuring -------------------------------------------------------------------------------------------------------


def _measure_all(nodes: int, local: int, deadline: float, most_bytes: int, shown: Progress) -> list[Measurement]:
    groups = {}
    for name in ALGORITHMS:
        options = _C.ProcessGroupOurs.Options()
        options.selection = f"all_reduce {name}"
        groups[name] = dist.new_group(backend="ours", pg_options=options)
    sizes = [LEAST_BYTES]
    while sizes[-1] * 4 <= most_bytes:
        sizes.append(sizes[-1] * 4)
    found: list[Measurement] = []
    before = 0.0  # seconds of a round of the size before
    try:
        for number, size in enumerate(sizes):
            some = [name for name in ALGORITHMS if name != "whole" or size * (nodes - 1) <= MOST_SENT]
            # A size that would not end before the deadline is not begun.
            if not _fits(deadline, 4 * before * (LEAST_ROUNDS + 1)):
                break
            share = (deadline - time.monotonic()) / (len(sizes) - number)
            shown.show(number, len(sizes), f"measuring {size} bytes")
            times, before = _measure(size, {name: groups[name] for name in some}, deadline, share)
            if not times:
                break
            built_in = _C.choose_algorithm("all_reduce", nodes, local, size)
            chosen = choose(times, built_in)
            found.append(Measurement(size, {name: statistics.median(times[name]) for name in some}, built_in, chosen))
    finally:
        shown.close()
        for group in groups.values():
            dist.destroy_process_group(group)
    return found


def _measure(
    size: int, groups: dict[str, dist.ProcessGroup], deadline: float, share: float
) -> tuple[dict[str, list[float]], float]:
    """Return the slowest rank's times of each algorithm, or none if time is up, and the seconds that a round takes."""
    names = list(groups)
    data = torch.zeros(size // 4)
    for name in names:  # makes the connections, and touches pages for the first time
        _time(data, groups[name])
    times: dict[str, list[float]] = {name: [] for name in names}
    start = time.monotonic()
    done, taken = 0, 0.0
    while done < MOST_ROUNDS:
        own = []
        for turn in range(LEAST_ROUNDS):
            order = [names[(turn + i) % len(names)] for i in range(len(names))]
            here = {name: _time(data, groups[name]) for name in order}
            own += [here[name] for name in names]
        slowest = _slowest(own)
        for i, name in enumerate(names):
            times[name] += slowest[i :: len(names)]
        done += LEAST_ROUNDS
        taken = time.monotonic() - start
        more = taken / done * LEAST_ROUNDS
        if not _fits(deadline, more) or not _fits(start + share, more):
            break
    return times if _fits(deadline, 0) else {}, taken / done


def _time(data: torch.Tensor, group: dist.ProcessGroup) -> float:
    dist.barrier()
    start = time.perf_counter()
    dist.all_reduce(data, group=group)
    return time.perf_counter() - start


def _slowest(seconds: list[float]) -> list[float]:
    tensor = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return tensor.tolist()


def _fits(deadline: float, seconds: float) -> bool:
    """Return whether so many more seconds end before the deadline, by rank 0's clock."""
    fits = torch.tensor([time.monotonic() + seconds <= deadline])
    dist.broadcast(fits, 0)
    return bool(fits.item())


# --- the file --------------------------------------------------------------------------------------------------------


def _agree(error: str) -> None:
    """Raise rank 0's error on all ranks."""
    errors = [error]
    dist.broadcast_object_list(errors, 0)
    if errors[0]:
        raise TuneError(errors[0])


def _unwritable(path: Path) -> str:
    if path.is_dir():
        return f"cannot write {path}: it is a directory; name a file with --output"
    try:
        with tempfile.TemporaryFile(dir=path.parent):
            return ""
    except OSError as error:
        return f"cannot write {path}: {error.strerror}; name another file with --output"


def _write(path: Path, text: str) -> str:
    """Replace the file by one that can be read back; return what went wrong."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(text)
        _C.selection_table(str(temporary.absolute()))
        temporary.replace(path)
    except (OSError, ValueError) as error:
        return f"cannot write {path}: {error}; name another file with --output"
    finally:
        temporary.unlink(missing_ok=True)
    return ""


# --- the command -----------------------------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``python -m ourddp tune``."""
    rows: list[tuple[str, Any, Any, str, str]] = [
        ("--output", Path, Path("ours-select.txt"), "PATH", "where to write"),
        ("--time-budget", float, 60.0, "SECONDS", "how long it may take"),
        ("--most-bytes", int, 64 << 20, "BYTES", "the largest array"),
        ("--nodes", int, 2, "N", "with --ranks: how many nodes to simulate"),
    ]
    for name, kind, default, unit, text in rows:
        parser.add_argument(name, type=kind, default=default, metavar=unit, help=f"{text} (default: %(default)s)")
    parser.add_argument(
        "--ranks", type=int, metavar="N", help="trial run: start N ranks on this machine (default: none)"
    )
    parser.add_argument("--json", action="store_true", help="print the measurements as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Tune as the command line says; return the exit status, 1 with a sentence of rank 0 if that failed.

    Raises ValueError if the command line makes no sense.
    """
    if arguments.most_bytes < LEAST_BYTES or arguments.time_budget <= 0:
        raise ValueError(f"--most-bytes must be at least {LEAST_BYTES}, and --time-budget greater than 0")
    if arguments.ranks is not None:
        joining.require_no_launcher(joining.find(os.environ))
        if not 2 <= arguments.nodes <= arguments.ranks:
            raise ValueError("--nodes must be at least 2, and --ranks at least as many as --nodes")
        return _start(arguments)
    here = joining.init()
    try:
        found = tune(arguments.output, arguments.time_budget, arguments.most_bytes, progress=True)
    except TuneError as error:
        if here.rank == 0:
            print(error, file=sys.stderr)
        return 1
    finally:
        dist.destroy_process_group()
    if here.rank == 0:
        print(_shown(found, arguments))
    return 0


def _shown(found: Sequence[Measurement], arguments: argparse.Namespace) -> str:
    """Return what the command prints when it has written the table."""
    table_of = str(arguments.output.absolute())
    if arguments.json:
        return json.dumps({"table": table_of, "measurements": [asdict(one) for one in found]}, indent=1)
    changed = sum(one.chosen != one.built_in for one in found)
    return "\n".join(
        [
            *describe(found),
            f"{changed} of {len(found)} sizes are faster with another algorithm than the one built in.",
            f"To use this table: OURS_SELECT={table_of}",
        ]
    )


def _start(arguments: argparse.Namespace) -> int:
    """Run this command in ranks of this machine, each of which belongs to one of ``arguments.nodes`` nodes."""
    command = [sys.executable, "-m", "ourddp", "tune", "--output", str(arguments.output.absolute())]
    command += ["--time-budget", str(arguments.time_budget), "--most-bytes", str(arguments.most_bytes)]
    command += ["--json"] if arguments.json else []
    ranks = arguments.ranks
    nodes = [{"OURS_NODE_ID": f"node {rank * arguments.nodes // ranks}"} for rank in range(ranks)]
    return processes.run_ranks(command, ranks, nodes)
