"""Times every collective: the backend `ours` against Gloo and, where mpi4py is installed, Open MPI.

    python benchmarks/collectives.py --ranks 4 --plot collectives.png
    python benchmarks/collectives.py --check

The program starts its own ranks. All peers run in the same processes, take turns, and meet before their turn through
a page of shared memory that belongs to no peer. There are two ways of calling: `loop`, the mean of many calls in a row
after one that is not timed, and `single`, one call after the ranks have met, as a training step makes it, which finds
the caches full of other things. A turn lasts from the last rank's start to the last rank's end; the table has the
median of all rounds. The result of a call is checked once for every peer and size before it is timed. The peer `floor`
is an all-reduce written by hand on memory that all ranks share, the least that this machine needs (zero_copy.h). The
size is that of a rank's larger buffer: what all_gather returns, what reduce_scatter takes. A ping-pong is half a round
trip, in pairs of ranks. Elements are float32, the tensors ordinary ones, and the calls those of torch.distributed and
mpi4py; all_reduce is in place. The case process_group_all_reduce is the same without torch.distributed's Python
function, which takes as long for every backend: the process group's own method, a thin binding like mpi4py's, and what
C++ such as a DDP reducer calls. async_all_reduce waits for its Work at once, and functional_all_reduce is the call of
DTensor and of compiled models; with one rank (`--ranks 1`) each shows what torch itself takes.

`--check` measures both kinds of all_reduce with 2, 4 and 8 ranks, both ways, and compares the medians with TARGETS,
which are ratios to what the peers and the floor take in the same run.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import scaffold
import torch
import torch.distributed as dist
import zero_copy

from ourddp.bench import collectives, harness
from ourddp.bench import report as reports
from ourddp.bench.operations import OPERATIONS, Buffers, Operation
from ourddp.progress import Progress

CHECK_SIZES = "4,64,1K,4K,16K,64K,256K,1M,4M,25M,100M"
BARE = "process_group_all_reduce"
PEERS = ("ours", "gloo", "mpi", "floor")


@dataclass(frozen=True)
class Target:
    """A promise: from `low` to `high` bytes `ours` takes at most a `times`-th of what `peer` takes, called `way`."""

    ranks: int
    low: str
    high: str
    peer: str
    times: float
    way: str
    collective: str = "all_reduce"


def both(*args: Any, **named: Any) -> list[Target]:
    """Return the promise for either way of calling."""
    return [Target(*args, way=way, **named) for way in reports.WAYS]


TARGETS = [
    *both(4, "4", "4", "gloo", 20),
    Target(4, "1K", "64K", "gloo", 100, "loop", BARE),
    Target(4, "1K", "64K", "floor", 0.5, "single", BARE),  # which itself is not 100 times as fast as Gloo then
    *both(4, "1M", "1M", "gloo", 10),
    *both(4, "25M", "100M", "gloo", 4.5),
    *both(2, "4", "4", "mpi", 0.5, collective=BARE),
    *both(4, "4", "16K", "mpi", 0.5, collective=BARE),
    *both(4, "64K", "4M", "mpi", 1),
    *both(4, "25M", "25M", "mpi", 1.2),
    *both(4, "100M", "100M", "mpi", 2.5),
    *both(4, "25M", "100M", "floor", 0.4),
    *both(8, "4", "100M", "gloo", 1),
]


def parse_arguments() -> argparse.Namespace:
    """Return the checked command line."""
    parser = scaffold.argument_parser(__doc__, seconds=300, of=", per number of ranks", picture=True)
    parser.add_argument("--ranks", help="numbers of ranks, as 2,4,8; otherwise 4")
    parser.add_argument("--collectives", help="which ones, separated by commas; otherwise all")
    parser.add_argument("--sizes", help="as 4,64K,25M; otherwise --min, four times that, and so on up to --max")
    parser.add_argument("--min", default="4", help="smallest size")
    parser.add_argument("--max", default="256M", help="largest size")
    parser.add_argument("--peers", help=f"of {', '.join(PEERS)}; default: those that are installed")
    parser.add_argument("--ways", help="of calling, separated by commas; otherwise loop,single")
    parser.add_argument("--reps", type=int, default=300, help="most rounds of a case")
    parser.add_argument("--check", action="store_true", help="measure what TARGETS need, and exit 1 if one is missed")
    parser.add_argument(
        "--load",
        type=Path,
        metavar="PATH",
        help="measure nothing; show those cases of an earlier run's --json that are asked for",
    )
    args = parser.parse_args()
    args.asked = {name: getattr(args, name) for name in ("ranks", "collectives", "ways") if getattr(args, name)}
    args.ranks, args.ways = args.ranks or "4", args.ways or "loop,single"
    args.collectives = args.collectives or ",".join(OPERATIONS)
    if args.check:
        args.ranks, args.collectives, args.sizes = "2,4,8", f"all_reduce,{BARE}", args.sizes or CHECK_SIZES
    scaffold.require_known(parser, args.collectives, OPERATIONS)
    scaffold.require_known(parser, args.peers or "ours", PEERS)
    scaffold.require_known(parser, args.ways, reports.WAYS)
    if args.reps < 1 or args.time_budget <= 0:
        parser.error("--reps and --time-budget must be positive")
    return args


def sizes_of(args: argparse.Namespace) -> list[int]:
    """Return the sizes in bytes that the command line asks for."""
    if args.sizes:
        return [reports.parse_size(size) for size in args.sizes.split(",")]
    size, last, sizes = max(1, reports.parse_size(args.min)), reports.parse_size(args.max), []
    while size <= last:
        sizes.append(size)
        size *= 4
    return sizes


def peers_of(args: argparse.Namespace) -> list[str]:
    """Return the peers to measure: without --peers, those that this Python has."""
    if args.peers:
        return args.peers.split(",")
    installed = {
        "ours": importlib.util.find_spec("ourddp"),
        "gloo": dist.is_gloo_available(),
        "mpi": harness.find_mpirun(),
        "floor": zero_copy.compiler(),
    }
    return [name for name, found in installed.items() if found]


def call_of(peer: str, operation: Operation, buffers: Buffers, group: Any) -> Callable[[], object]:
    """Return the peer's call of the collective; NotImplementedError where it has none."""
    if peer != "floor":
        return collectives.call_of(peer, operation, buffers, group)
    if operation not in (OPERATIONS["all_reduce"], OPERATIONS[BARE]):
        raise NotImplementedError
    return group.call(buffers)


def rank_main() -> None:
    """Measure what the plan says; rank 0 reports the rows."""
    with harness.StartedRanks() as ranks:
        plan, groups, rows = ranks.plan, {}, []
        for peer in plan["peers"]:
            is_floor = peer == "floor"
            groups[peer] = (
                zero_copy.Floor(ranks, Path(plan["floor"])) if is_floor else collectives.group_of(ranks, peer)
            )
        cases = [(name, size) for name in plan["collectives"] for size in (plan["sizes"] if name != "barrier" else [0])]
        shown = Progress(sys.stderr if ranks.rank == 0 else None, "cases")
        for number, (name, size) in enumerate(cases):
            shown.show(number, len(cases), f"measuring {name} of {reports.show_size(size)} with {ranks.size} ranks")
            buffers = {
                peer: group.buffers(size) if peer == "floor" else Buffers.make(ranks.rank, ranks.size, size)
                for peer, group in groups.items()
            }
            rows.extend(collectives.measure(ranks, groups, (name, size), buffers, call_of))
        shown.close()
        ranks.report = rows


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Return the report of all runs that the command line asks for."""
    names, sizes, peers, ways = args.collectives.split(","), sizes_of(args), peers_of(args), args.ways.split(",")
    cases = len(ways) * sum(1 if name == "barrier" else len(sizes) for name in names)
    plan = {
        "peers": peers,
        "collectives": names,
        "ways": ways,
        "sizes": sizes,
        "reps": args.reps,
        "seconds_per_case": args.time_budget / max(1, cases),
    }
    print(args.machine)
    runs = []
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        if "floor" in peers:
            plan["floor"] = str(zero_copy.build(Path(folder)))
        for ranks in map(int, args.ranks.split(",")):
            timeout = 300 + 4 * args.time_budget
            rows = harness.run_ranks([__file__], plan, ranks, mpi="mpi" in peers, timeout=timeout)
            runs.append({"ranks": ranks, "peers": peers, "rows": rows})
            reports.print_collectives(runs[-1])
    return {"machine": args.machine, "torch": torch.__version__, "runs": runs}


def load(args: argparse.Namespace) -> dict[str, Any]:
    """Return the cases of an earlier report that the command line asks for; all of them if it asks for none."""
    report: dict[str, Any] = json.loads(args.load.read_text())
    for run in report["runs"]:
        for name, key in (("collectives", "collective"), ("ways", "way")):
            if name in args.asked:
                run["rows"] = [row for row in run["rows"] if row[key] in args.asked[name].split(",")]
    if "ranks" in args.asked:
        report["runs"] = [run for run in report["runs"] if str(run["ranks"]) in args.asked["ranks"].split(",")]
    return report


def check(report: dict[str, Any]) -> bool:
    """Print for each target how the measured medians compare; return whether all that could be judged are met."""
    met = True
    print()
    for target in TARGETS:
        rows = [
            row
            for run in report["runs"]
            for row in run["rows"]
            if run["ranks"] == target.ranks
            and (row["collective"], row["way"]) == (target.collective, target.way)
            and reports.parse_size(target.low) <= row["size"] <= reports.parse_size(target.high)
        ]
        for row in rows:
            ours, peer = reports.median(row, "ours"), reports.median(row, target.peer)
            case = f"{target.collective}, {target.ranks} ranks, {reports.show_size(row['size']):>7}, {target.way}"
            promise = f"{case}: at least {target.times:g} times as fast as {target.peer}"
            if ours is None or peer is None:
                print(f"SKIP  {promise}: {'ours' if ours is None else target.peer} was not measured")
                continue
            good = peer / ours >= target.times
            met = met and good
            print(f"{'PASS' if good else 'FAIL'}  {promise}: {peer / ours:.2f} times")
        if not rows:
            print(f"SKIP  {target.collective}, {target.ranks} ranks, {target.low} to {target.high}: not measured")
    return met


def main() -> int:
    """Measure, or load, and report; return the exit status."""
    args = parse_arguments()
    report = load(args) if args.load else run(args)
    if args.load:
        for earlier in report["runs"]:
            reports.print_collectives(earlier)
    if args.json:
        scaffold.write_json(report, args.json)
    if args.plot:
        scaffold.plot_collectives(report, args.plot)
    return 0 if not args.check or check(report) else 1


if __name__ == "__main__":
    scaffold.start(main, rank_main)
