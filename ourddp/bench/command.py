"""The command ``bench``: its arguments, the peers that there are, its tables and files."""

from __future__ import annotations

import argparse
import csv
import importlib.util
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ourddp import joining, processes
from ourddp.bench import harness, report
from ourddp.bench.operations import OPERATIONS
from ourddp.bench.ranks import MOST, STEPS, measure, use_device
from ourddp.bench.steps import MODELS

HELP = "time collectives and training steps on this machine, or on an allocation, against the other backends"
PEERS = ("ours", "gloo", "mpi", "nccl")
DEFAULT_OPS = ("all_reduce", "broadcast", "all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single", STEPS)
STEPS_SHARE = 0.3  # of the time, for the training steps
COLUMNS = ("operation", "ranks", "bytes", "peer", "median_seconds", "low_seconds", "high_seconds", "rounds")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``python -m ourddp bench``."""
    parser.add_argument(
        "--ranks",
        type=int,
        metavar="N",
        help="without a launcher: how many to start here (default: one a core, 2 to 8)",
    )
    parser.add_argument("--sizes", default="1K,64K,1M,16M", help="of a rank's larger buffer (default: %(default)s)")
    parser.add_argument(
        "--ops",
        default=",".join(DEFAULT_OPS),
        help=f"of {', '.join(OPERATIONS)}, and {STEPS}, which is training steps (default: %(default)s)",
    )
    parser.add_argument("--model", default="mlp", choices=MODELS, help=f"what {STEPS} trains (default: %(default)s)")
    parser.add_argument("--peers", help=f"of {', '.join(PEERS)} (default: those that are here)")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"), help="of tensors (default: %(default)s)")
    parser.add_argument(
        "--seconds", type=float, default=60.0, metavar="N", help="of measuring, about (default: %(default)s)"
    )
    parser.add_argument("--csv", type=Path, metavar="FILE", help="write the times there, too")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw the times there, too; needs matplotlib")
    parser.add_argument("--json", action="store_true", help="print the times as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Measure, and print and write the times; return the exit status, 1 with a sentence on stderr if that failed."""
    plan = plan_of(arguments)
    place = joining.find(os.environ)
    if place.launcher == "none":
        ranks = arguments.ranks or min(8, max(2, processes.cores()))
        timeout = 300 + 4 * arguments.seconds
        try:
            found = harness.run_ranks(
                ["-m", "ourddp.bench.ranks"], plan, ranks, mpi="mpi" in plan["peers"], timeout=timeout
            )
        except RuntimeError as error:
            raise ValueError(str(error)) from error
    else:
        if arguments.ranks is not None:
            raise ValueError(
                f"--ranks is for a machine alone, but {place.launcher} has started this rank: leave it out"
            )
        with harness.JobRanks(place, plan) as rank:
            use_device(rank)
            found = measure(rank)
        ranks = place.world_size
        if place.rank != 0:
            return 0
    run_of = {"ranks": ranks, "peers": plan["peers"], **found}
    write({"machine": harness.machine(), "torch": torch.__version__, "runs": [run_of]}, arguments)
    return 0


def plan_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return what to measure; ValueError if that makes no sense, or cannot be written."""
    ops, peers = arguments.ops.split(","), peers_here(arguments.device)
    for name in ops:
        if name not in OPERATIONS and name != STEPS:
            raise ValueError(f"there is no operation {name}: choose from {', '.join([*OPERATIONS, STEPS])}")
    for name in arguments.peers.split(",") if arguments.peers else []:
        if name not in peers:
            raise ValueError(
                f"{name} is not here, or cannot have tensors of that device: choose from {', '.join(peers)}"
            )
    if arguments.seconds <= 0 or (arguments.ranks is not None and arguments.ranks < 1):
        raise ValueError("--seconds must be greater than 0, and --ranks at least 1")
    if arguments.plot and importlib.util.find_spec("matplotlib") is None:
        raise ValueError("--plot needs matplotlib: pip install matplotlib, or use --csv")
    for path in filter(None, (arguments.csv, arguments.plot)):
        if path.is_dir() or not path.absolute().parent.is_dir():
            raise ValueError(f"cannot write {path}: name a file in a folder that exists")
    sizes = [report.parse_size(size) for size in arguments.sizes.split(",")]
    cases = sum(1 if name == "barrier" else len(sizes) for name in ops if name != STEPS)
    seconds = arguments.seconds * (1 if STEPS not in ops or not cases else 1 - STEPS_SHARE)
    return {
        "ops": ops,
        "sizes": sizes,
        "peers": arguments.peers.split(",") if arguments.peers else peers,
        "ways": ["loop"],
        "reps": MOST,
        "model": arguments.model,
        "device": arguments.device,
        "seconds_per_case": seconds / max(1, cases),
        "seconds_of_steps": arguments.seconds * (STEPS_SHARE if cases else 1),
    }


def peers_here(device: str) -> list[str]:
    """Return the peers that can have tensors of that device here; ValueError if there is no such device."""
    if device == "cuda":
        if not torch.cuda.is_available():
            raise ValueError("torch finds no CUDA device here: leave --device out")
        return [
            "ours",
            *(["gloo"] if dist.is_gloo_available() else []),
            *(["nccl"] if dist.is_nccl_available() else []),
        ]
    alone = joining.find(os.environ).launcher == "none"
    found = {"ours": True, "gloo": dist.is_gloo_available(), "mpi": alone and harness.find_mpirun()}
    return [name for name, there in found.items() if there]


# --- results ---------------------------------------------------------------------------------------------------------


def write(found: dict[str, Any], arguments: argparse.Namespace) -> None:
    """Print and write the times."""
    (one,) = found["runs"]
    if arguments.json:
        print(json.dumps(found, indent=1))
    else:
        print(report.source_of(found))
        report.print_collectives(one)
        for row in one["steps"]:
            report.print_steps(row, one["ranks"])
    if arguments.csv:
        with arguments.csv.open("w", newline="") as file:
            csv.writer(file).writerows([COLUMNS, *lines(one)])
    if arguments.plot:
        report.plot_all(found, arguments.plot)


def lines(one: dict[str, Any]) -> Iterator[tuple[Any, ...]]:
    """Return a line of the CSV file for each time; COLUMNS has the names."""
    named = [
        *((row["collective"], row) for row in one["rows"]),
        *((f"{STEPS} {row['model']}", row) for row in one["steps"]),
    ]
    for name, row in named:
        for peer, seconds in row["seconds"].items():
            times = [seconds[which] for which in ("median", "low", "high")]
            yield name, one["ranks"], row["bytes"], peer, *times, row["rounds"]
