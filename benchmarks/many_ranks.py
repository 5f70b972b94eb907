"""Times all-reduces of up to 128 ranks on this machine, beside what is predicted from what they do.

    python benchmarks/many_ranks.py --json many_ranks.json
    python benchmarks/many_ranks.py --load benchmarks/results/many_ranks.json

The ranks are those of benchmarks/tcp.cpp, processes that play nodes: shared memory within a node, TCP between nodes.
Where many ranks share a few cores and no link has a limit, an all-reduce takes the time of all that they do together,
divided by the number of cores. That is counted: messages, bytes that go through sockets, bytes in the memory of nodes
and ranks that synchronise. What one of each costs is fitted to the runs of FEW, by least squares of the relative error,
and then predicts those of MANY. --limit says by which factor the prediction may be off.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import re
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import scaffold
import torch

from ourddp import _C, processes
from ourddp.bench import report as reports

ROOT = Path(__file__).resolve().parent.parent
FEW = ((2, 4), (4, 2), (8, 1))  # nodes and ranks of each
MANY = ((64, 1), (16, 4), (8, 8), (32, 4), (16, 8))
STAGE = 512 << 10  # bytes that a rank shows its node at a time
PART = 256 << 10  # bytes of the longest message between ranks that have a node each
TIMEOUT_S = 600
WORK = ("message", "byte between nodes", "byte in nodes", "rank that synchronises")
UNITS = ("us", "ns", "ns", "us")


def work(nodes: int, local: int, size: int) -> list[float]:
    """Return what all ranks of an all-reduce do together, in the order of WORK."""
    algorithm = _C.choose_algorithm("all_reduce", nodes, local, size)
    synchronisations = 2
    if algorithm in ("direct", "ring"):
        if local == 1:  # every rank has a slice
            rails, chunks = 1, max(1, -(-size // nodes // PART))
        else:
            rails, chunks = _C.choose_rails(nodes, local, size, algorithm == "ring")
        messages = nodes * rails * chunks * 2 * (nodes - 1)
        between = 2 * (nodes - 1) * size
        # A chunk comes in rounds if it is longer than a stage, and the results of some are under way.
        synchronisations = math.ceil(size / chunks / STAGE) * (chunks + 3)
    else:  # a rank of each node sends everything
        steps = nodes.bit_length() - 1
        paired = 2 * (nodes - (1 << steps))  # where nodes are no power of two: before and after the steps
        messages = (steps << steps) + paired if algorithm == "doubling" else nodes * (nodes - 1)
        between = messages * size
        if algorithm == "doubling" and local > 1:
            messages += nodes  # by which the nodes agree that all have made the call
    ranks = nodes * local if local > 1 else 0
    return [messages, between, ranks * size, ranks * synchronisations]


def fit(rows: Iterable[dict[str, Any]], cores: int) -> torch.Tensor:
    """Return the seconds that each of WORK takes a core, none of them negative."""
    rows = list(rows)
    shares = torch.tensor([work(r["nodes"], r["local"], r["size"]) for r in rows], dtype=torch.float64)
    shares /= cores * torch.tensor([[r["seconds"]] for r in rows], dtype=torch.float64)
    wanted = torch.ones(len(rows), 1, dtype=torch.float64)
    best, least = torch.zeros(len(WORK), dtype=torch.float64), math.inf
    # Of so few costs, all choices of those that are not zero can be tried.
    for kept in itertools.chain.from_iterable(
        itertools.combinations(range(len(WORK)), n + 1) for n in range(len(WORK))
    ):
        columns = shares[:, kept]
        found = torch.linalg.lstsq(columns, wanted).solution
        error = float((columns @ found - wanted).square().sum())
        if found.min() >= 0 and error < least:
            least, best = error, torch.zeros(len(WORK), dtype=torch.float64)
            best[list(kept)] = found[:, 0]
    return best


def build() -> Path:
    """Make the program whose ranks are timed, and return its path."""
    command = ["make", "-s", "-C", str(ROOT), "-f", "tests/cpp/Makefile", "tcp_path"]
    made = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return ROOT / made.stdout.splitlines()[-1]


def measure(budget: float) -> list[dict[str, Any]]:
    """Return the median times of all cases, which take turns until ``budget`` seconds are spent, or one each."""
    program = build()
    seconds: dict[tuple[int, int, int], list[float]] = defaultdict(list)
    end = time.monotonic() + budget
    while not seconds or time.monotonic() < end:
        for nodes, local in (*FEW, *MANY):
            print(f"{nodes} x {local} ranks", file=sys.stderr)
            group = "nodes" if local > 1 else "flat"
            command = [str(program), "--group", group, "--nodes", str(nodes), "--local", str(local)]
            output = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=TIMEOUT_S, check=True).stdout
            for size, microseconds in re.findall(r"(\d+) bytes +([\d.]+) us", output):
                seconds[nodes, local, int(size)].append(float(microseconds) * 1e-6)
    return [
        {"nodes": nodes, "local": local, "size": size, "seconds": statistics.median(times)}
        for (nodes, local, size), times in seconds.items()
    ]


def compare(report: dict[str, Any], limit: float) -> bool:
    """Print all cases and their predictions; return whether those of MANY are right but for the factor ``limit``."""
    few = [row for row in report["rows"] if (row["nodes"], row["local"]) in FEW]
    costs = fit(few, report["cores"])
    scale = {"us": 1e6, "ns": 1e9}
    told = (f"{cost * scale[unit]:.2f} {unit} a {name}" for cost, unit, name in zip(costs, UNITS, WORK, strict=True))
    print(f"a core takes {', '.join(told)}, by the runs of {FEW[0][0] * FEW[0][1]} ranks\n")
    lines = []
    good = True
    for row in report["rows"]:
        case = (row["nodes"], row["local"], row["size"])
        predicted = float(torch.tensor(work(*case), dtype=torch.float64) @ costs) / report["cores"]
        ratio = row["seconds"] / predicted
        good = good and (case[:2] in FEW or 1 / limit <= ratio <= limit)
        algorithm = _C.choose_algorithm("all_reduce", *case)
        times = [reports.show_seconds(row["seconds"]), reports.show_seconds(predicted)]
        lines.append([f"{case[0]} x {case[1]}", reports.show_size(case[2]), algorithm, *times, f"{ratio:.2f}"])
    reports.print_table(["ranks", "size", "algorithm", "measured", "predicted", "measured/predicted"], lines)
    return good


def parse_arguments() -> argparse.Namespace:
    """Return the checked command line."""
    parser = scaffold.argument_parser(__doc__, seconds=300)
    parser.add_argument("--load", type=Path, metavar="PATH", help="measure nothing; show an earlier run's --json")
    parser.add_argument(
        "--limit", type=float, default=4.0, help="exit with 1 if a prediction is off by a larger factor"
    )
    args = parser.parse_args()
    if args.limit < 1:
        parser.error("--limit must be at least 1")
    return args


def main() -> int:
    """Measure or load, print the comparison, and return the exit status."""
    args = parse_arguments()
    if args.load is not None:
        report = json.loads(args.load.read_text())
    else:
        report = {"machine": args.machine, "cores": processes.cores(), "rows": measure(args.time_budget)}
    if args.json is not None:
        scaffold.write_json(report, args.json)
    return 0 if compare(report, args.limit) else 1


if __name__ == "__main__":
    sys.exit(main())
