"""The command ``bench``: its arguments, the peers that there are, its tables and files."""

from __future__ import annotations

import argparse
import csv
import importlib.util
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ourddp import joining, processes
from ourddp.bench import harness, report
from ourddp.bench.job_ranks import JobRanks
from ourddp.bench.operations import OPERATIONS
from ourddp.bench.ranks import STEPS, measure, own_device, use_device
from ourddp.bench.steps import MODELS

HELP = "time collectives and training steps on this machine, or on an allocation, against the other backends"
PEERS = ("ours", "gloo", "mpi", "nccl")
DEFAULT_OPS = ("all_reduce", "broadcast", "all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single", STEPS)
STEPS_SHARE = 0.3  # of the time, for the training steps
PICTURES = (".png", ".svg", ".pdf")
MPI_LAUNCHERS = ("Open MPI", "Hydra")  # and srun --mpi=pmix
COLUMNS = ("operation", "ranks", "bytes", "peer", "median_seconds", "low_seconds", "high_seconds", "rounds")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``python -m ourddp bench``."""
    parser.add_argument(
        "--ranks",
        type=int,
        metavar="N",
        help=f"without a launcher: how many to start here (default: one a core, 2 to {processes.MOST_STARTED})",
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
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw the times there, too, by matplotlib")
    parser.add_argument("--json", action="store_true", help="print the times as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Measure, and print and write the times; return the exit status, 1 with a sentence on stderr if that failed."""
    place = joining.find(os.environ)
    if place.launcher == "none":
        plan = plan_of(arguments, place)
        try:
            found = harness.run_ranks(
                ["-m", "ourddp.bench.ranks"],
                plan,
                plan["ranks"],
                mpi=harness.open_mpi(plan["ranks"]) if "mpi" in plan["peers"] else None,
                timeout=300 + 4 * arguments.seconds,
            )
        except RuntimeError as error:
            raise ValueError(str(error)) from error
    else:
        with JobRanks(place) as rank:
            rank.plan = plan = agreed_plan(arguments, place)
            use_device(rank)
            found = measure(rank)
        if place.rank != 0:
            return 0
    run_of = {"ranks": plan["ranks"], "peers": plan["peers"], **found}
    write({"machine": harness.machine(), "torch": torch.__version__, "runs": [run_of]}, arguments)
    return 0


def agreed_plan(arguments: argparse.Namespace, place: joining.Launch) -> dict[str, Any]:
    """Return rank 0's plan, without the peers that any rank of the job lacks.

    Nodes may differ in what is installed, in their devices and in their files. Raises ValueError, on all ranks, if one
    of them cannot take part.
    """
    own: dict[str, Any] = {}
    try:
        own["plan"] = plan_of(arguments, place)
        own["device"] = device_id(arguments.device)
    except ValueError as error:
        own["error"] = str(error)
    everyone: list[dict[str, Any]] = [{}] * place.world_size
    dist.all_gather_object(everyone, own)
    for rank, each in enumerate(everyone):
        if "error" in each:
            raise ValueError(f"rank {rank}: {each['error']}")
    plan = everyone[0]["plan"]
    common = [peer for peer in plan["peers"] if all(peer in each["plan"]["peers"] for each in everyone)]
    if "nccl" in common and len({each["device"] for each in everyone}) < len(everyone):
        if arguments.peers:
            raise ValueError("nccl needs a device for each rank: start fewer ranks on a node, or leave nccl out")
        common.remove("nccl")
    return {**plan, "peers": common}


def device_id(device: str) -> str | None:
    """Return the unique id of this rank's CUDA device; None if the rank measures on the CPU."""
    return str(torch.cuda.get_device_properties(own_device()).uuid) if device == "cuda" else None


def plan_of(arguments: argparse.Namespace, place: joining.Launch) -> dict[str, Any]:
    """Return what to measure; ValueError if that makes no sense, or cannot be written."""
    ops = arguments.ops.split(",")
    for name in ops:
        if name not in OPERATIONS and name != STEPS:
            raise ValueError(f"there is no operation {name}: choose from {', '.join([*OPERATIONS, STEPS])}")
    if arguments.seconds <= 0:
        raise ValueError("--seconds must be greater than 0")
    if place.rank == 0:
        check_files(arguments)
    ranks = number_of_ranks(arguments.ranks, place)
    sizes = [report.parse_size(size) for size in arguments.sizes.split(",")]
    cases = sum(len(sizes) if OPERATIONS[name].has_size else 1 for name in ops if name != STEPS)
    seconds = arguments.seconds * (1 if STEPS not in ops or not cases else 1 - STEPS_SHARE)
    return {
        "ranks": ranks,
        "ops": ops,
        "sizes": sizes,
        "peers": peers_of(arguments, place, ranks),
        "model": arguments.model,
        "device": arguments.device,
        "seconds_per_case": seconds / max(1, cases),
        "seconds_of_steps": arguments.seconds * (STEPS_SHARE if cases else 1),
    }


def check_files(arguments: argparse.Namespace) -> None:
    """Raise ValueError if a file that is asked for could not be written in the end."""
    if arguments.plot and importlib.util.find_spec("matplotlib") is None:
        raise ValueError("--plot needs matplotlib: pip install matplotlib, or use --csv")
    if arguments.plot and arguments.plot.suffix not in PICTURES:
        raise ValueError(f"--plot cannot draw {arguments.plot}: let its name end in {', '.join(PICTURES)}")
    for path in filter(None, (arguments.csv, arguments.plot)):
        if path.is_dir() or not os.access(path if path.exists() else path.absolute().parent, os.W_OK):
            raise ValueError(f"cannot write {path}: name a file in a folder that exists and that you may write to")


def number_of_ranks(asked: int | None, place: joining.Launch) -> int:
    """Return how many ranks measure: those of the job, or how many to start here; ValueError for nonsense."""
    if place.launcher != "none":
        if asked is not None:
            joining.require_no_launcher(place)
        return place.world_size
    if asked is not None and asked < 1:
        raise ValueError("--ranks must be at least 1")
    return asked or processes.default_ranks()


def peers_of(arguments: argparse.Namespace, place: joining.Launch, ranks: int) -> list[str]:
    """Return the peers that can have tensors of the device here, or those of them that are asked for."""
    there = peers_here(arguments.device, place, ranks)
    asked = arguments.peers.split(",") if arguments.peers else there
    for name in asked:
        if name not in there:
            raise ValueError(
                f"{name} is not here, or cannot serve these ranks and their device: choose from {', '.join(there)}"
            )
    return asked


def peers_here(device: str, place: joining.Launch, ranks: int) -> list[str]:
    """Return the peers that there are; ValueError if there is no such device."""
    if device == "cuda":
        if not torch.cuda.is_available():
            raise ValueError("torch finds no CUDA device here: leave --device out")
        found = {"ours": True, "gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available()}
        # NCCL has one rank on each device. A launcher may show each rank a device of its own: see agreed_plan.
        found["nccl"] &= place.launcher != "none" or ranks <= torch.cuda.device_count()
    else:
        found = {"ours": True, "gloo": dist.is_gloo_available(), "mpi": has_mpi(place, os.environ)}
    return [name for name, there in found.items() if there]


def has_mpi(place: joining.Launch, environment: Mapping[str, str]) -> bool:
    """Return whether the ranks can use mpi4py: they are processes of one MPI job, or can be started as such here."""
    if importlib.util.find_spec("mpi4py") is None:
        return False
    if place.launcher == "none":
        return harness.find_mpirun() is not None
    return place.launcher in MPI_LAUNCHERS or (place.launcher == "Slurm" and "PMIX_RANK" in environment)


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
