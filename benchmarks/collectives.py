"""Times every collective: the backend `ours` against Gloo, MPIs and DeepSpeed, as far as they are installed.

    python benchmarks/collectives.py --ranks 4 --plot collectives.png
    python benchmarks/collectives.py --check
    python benchmarks/collectives.py --ranks 2,4,8 --rivals FOLDER

The program starts its own ranks, processes of its own for each peer: peers.py has what they are and how they start. All
live at once and take turns, and those that wait sleep. In a turn one peer's ranks first meet through a page of shared
memory that belongs to no peer. There are two usual ways of calling: `loop`, the mean of many calls in a row after one
that is not timed, and `single`, one call after the ranks have met, as a training step makes it: of data that each rank
has just written, and with caches that are full of other things. A third way takes part only if --ways names it:
`written`, calls in a loop before each of which the rank writes its data, which is timed with them. A loop that sends
the same data again and again finds a copy of it in the caches of those that read it. A turn lasts from the last rank's
start to the last rank's end; the table has the median of all rounds. Every peer has the same share of the time, so that
a slow one has fewer turns. The result of a call is checked once for every peer and size before it is timed. The peer
`floor` is an all-reduce written by hand on memory that all ranks share, the least that this machine needs
(zero_copy.h). The size is that of a rank's larger buffer: what all_gather returns, what reduce_scatter takes. A
ping-pong is half a round trip, in pairs of ranks. Elements are float32, the tensors ordinary ones, and the calls those
of torch.distributed and mpi4py; all_reduce is in place. The cases process_group_... are the same without
torch.distributed's Python functions, which take as long for every backend: the process group's own methods, a thin
binding like mpi4py's, and what C++ such as a DDP reducer calls; without --collectives only that of all_reduce takes
part. async_all_reduce waits for its Work at once, and functional_all_reduce is the call of DTensor and of models that
torch compiles; operator_all_reduce is that of ourddp.functional. With one rank (`--ranks 1`) each shows what torch
itself takes. Four peers take part only if --peers names them: `ours_shared`, whose tensors all ranks map, `ours_nodes`,
ranks of `ours` that play two nodes, `nothing`, torch's backend `fake`, which shows what a call of torch's takes before
and after the backend's part, and `openmpi_c10d`, Open MPI after a barrier of `nothing` each time: about the least that
it would take as a backend of torch's.

`--check` measures both kinds of all_reduce with 2, 4 and 8 ranks, both ways, and compares the medians with TARGETS,
which are ratios to what the peers and the floor take in the same run.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import peers
import scaffold
import torch
import turns

from ourddp.bench import collectives, harness
from ourddp.bench import report as reports
from ourddp.bench.operations import OPERATIONS, OWN, Buffers
from ourddp.progress import Progress

CHECK_SIZES = "4,64,1K,4K,16K,64K,256K,1M,4M,25M,100M"
BARE = peers.BARE
USUAL = "loop,single"  # the ways of calling, if none is asked for
ACTS = ("leave", "try", *reports.WAYS)  # what a job is asked to do with a case
LONGEST_LOOP = 0.2  # seconds; a loop of slow calls has fewer
PATIENCE = 1.0  # seconds; a peer whose call takes longer is left out of the case, and of larger sizes
LEAD = 1.05  # a rival is ahead of ours when ours takes longer than this times its time


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
    return [Target(*args, way=way, **named) for way in USUAL.split(",")]


TARGETS = [
    *both(4, "4", "4", "gloo", 20),
    Target(4, "1K", "64K", "gloo", 100, "loop", BARE),
    Target(4, "1K", "64K", "floor", 0.5, "single", BARE),  # which itself is not 100 times as fast as Gloo then
    *both(4, "1M", "1M", "gloo", 10),
    *both(4, "25M", "100M", "gloo", 4.5),
    *both(2, "4", "4", "openmpi", 0.5, collective=BARE),
    *both(4, "4", "16K", "openmpi", 0.5, collective=BARE),
    *both(4, "64K", "4M", "openmpi", 1),
    *both(4, "25M", "25M", "openmpi", 1.2),
    *both(4, "100M", "100M", "openmpi", 2.5),
    *both(4, "25M", "100M", "floor", 0.4),
    *both(8, "4", "100M", "gloo", 1),
]


def parse_arguments() -> argparse.Namespace:
    """Return the checked command line."""
    parser = scaffold.argument_parser(__doc__, seconds=300, of=", per number of ranks", picture=True)
    parser.add_argument("--ranks", help="numbers of ranks, as 2,4,8; otherwise 4")
    parser.add_argument("--collectives", help="which ones, separated by commas; otherwise most")
    parser.add_argument("--sizes", help="as 4,64K,25M; otherwise --min, four times that, and so on up to --max")
    parser.add_argument("--min", default="4", help="smallest size")
    parser.add_argument("--max", default="256M", help="largest size")
    parser.add_argument("--peers", help=f"of {', '.join(peers.NAMES)}; default: those that are here")
    parser.add_argument("--rivals", type=Path, metavar="FOLDER", help="where pip has put libraries to compare with")
    parser.add_argument("--ways", help=f"of calling, of {', '.join(reports.WAYS)}; otherwise {USUAL}")
    parser.add_argument("--reps", type=int, default=300, help="most rounds of a case")
    parser.add_argument("--calls", type=int, help="most of a loop; otherwise 20 of less than 512 KiB, and 5 of more")
    parser.add_argument("--check", action="store_true", help="measure what TARGETS need, and exit 1 if one is missed")
    parser.add_argument(
        "--load",
        type=Path,
        metavar="PATH",
        help="measure nothing; show those cases of an earlier run's --json that are asked for",
    )
    args = parser.parse_args()
    args.asked = {name: getattr(args, name) for name in ("ranks", "collectives", "ways") if getattr(args, name)}
    args.ranks, args.ways = args.ranks or "4", args.ways or USUAL
    args.collectives = args.collectives or ",".join(
        name for name in OPERATIONS if name == BARE or not name.startswith(OWN)
    )
    if args.check:
        args.ranks, args.collectives, args.sizes = "2,4,8", f"all_reduce,{BARE}", args.sizes or CHECK_SIZES
    scaffold.require_known(parser, args.collectives, OPERATIONS)
    scaffold.require_known(parser, args.peers or "ours", peers.NAMES)
    scaffold.require_known(parser, args.ways, reports.WAYS)
    if args.reps < 1 or args.time_budget <= 0 or (args.calls is not None and args.calls < 1):
        parser.error("--reps, --calls and --time-budget must be positive")
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
    """Return the peers to measure; print why others are not here, and end the program if --peers names one of them."""
    found = []
    for name in args.peers.split(",") if args.peers else peers.DEFAULT:
        reason = peers.why_not(name, args.rivals)
        if not reason:
            found.append(name)
        elif args.peers:
            sys.exit(f"{name} cannot take part: {reason}")
        else:
            print(f"without {name}: {reason}")
    return found


# --- in the ranks ----------------------------------------------------------------------------------------------------


def rank_main() -> None:
    """Call one peer's collectives as the plan and the turns say."""
    with harness.StartedRanks() as ranks:
        turns.serve(ranks, Caller(ranks).do)


class Caller:
    """Does in a rank what it is asked to do with a case: try, or measure in one of the ways; it keeps one case."""

    def __init__(self, ranks: harness.Ranks) -> None:
        """Join the peer that the plan names."""
        self._ranks, self._plan = ranks, ranks.plan
        self._name = ranks.plan["peer"]
        self._peer = peers.Joined(ranks, self._name, ranks.plan["library"], ranks.plan["rivals"])

    def do(self, asked: int) -> float:
        """Return the seconds of a call; NaN where the peer has none, or was not asked for any."""
        case, act = divmod(asked, len(ACTS))
        if ACTS[act] == "leave":
            self._call = self._buffers = None  # the memory is for others
            return math.nan
        if ACTS[act] == "try":
            return self._begin(*self._plan["cases"][case])
        if ACTS[act] == "written":
            return self._measure(self._burst, self._write_and_call)
        return self._measure(self._burst if ACTS[act] == "loop" else 0)

    def _begin(self, collective: str, size: int) -> float:
        self._operation, self._buffers = OPERATIONS[collective], self._peer.buffers(size)
        if self._name == peers.NOTHING:  # without a result to check
            self._call = self._peer.call_of(self._operation, self._buffers)
        else:
            named = {self._name: self._buffers}, {self._name: self._peer.group}
            made = collectives.calls(self._operation, *named, lambda _, *case: self._peer.call_of(*case[:2]))
            self._call = made.get(self._name)
        if not self._call:
            return math.nan
        seconds = self._measure(0)
        self._burst = max(1, min(self._plan["calls"] or collectives.burst_of(size), int(LONGEST_LOOP / seconds)))
        return seconds

    def _write_and_call(self) -> None:
        self._operation.touch(self._buffers)
        self._call()

    def _measure(self, burst: int, action: Callable[[], object] | None = None) -> float:
        if self._operation.changes_input or not burst:
            self._operation.prepare(self._buffers)
        seconds = float(self._ranks.span(self._ranks.turn_of(action or self._call, burst)))
        return seconds / max(1, burst) * (0.5 if self._operation.half else 1.0)


# --- outside of them -------------------------------------------------------------------------------------------------


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Return the report of all runs that the command line asks for."""
    print(args.machine)
    if args.rivals:
        sys.path.append(str(args.rivals))
    names, sizes = peers_of(args), sizes_of(args)
    cases = [
        (name, size) for name in args.collectives.split(",") for size in (sizes if OPERATIONS[name].has_size else [0])
    ]
    report: dict[str, Any] = {"machine": args.machine, "torch": torch.__version__, "calls": args.calls, "runs": []}
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        rivals = str(args.rivals.resolve()) if args.rivals else ""
        plans = {
            name: {
                "peer": name,
                "cases": cases,
                "calls": args.calls,
                "library": peers.build(name, Path(folder)),
                "rivals": rivals,
            }
            for name in names
        }
        for ranks in map(int, args.ranks.split(",")):
            mpi = {name: peers.launch_of(name, args.rivals, ranks) for name in names}
            started = {name: how for name, how in mpi.items() if how}
            with turns.Jobs([__file__], plans, ranks, timeout=900 + 4 * args.time_budget, mpi=started) as jobs:
                rows, left_out = measure(jobs, ranks, cases, args)
                # A job that does not end well must not take the times with it.
                report["runs"].append({"ranks": ranks, "peers": names, "rows": rows, "left_out": left_out})
                if args.json:
                    scaffold.write_json(report, args.json)
            reports.print_collectives(report["runs"][-1])
            for reason in left_out:
                print(reason)
    return report


def measure(
    jobs: turns.Jobs, ranks: int, cases: list[tuple[str, int]], args: argparse.Namespace
) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the rows of all cases, one for each way of calling, and which peers are too slow for some of them."""
    names, ways = list(jobs.plans), args.ways.split(",")
    budget = args.time_budget / (len(cases) * len(ways))
    rows: list[dict[str, Any]] = []
    left_out: dict[tuple[str, str], str] = {}
    shown = Progress(sys.stderr, "cases")
    for number, (collective, size) in enumerate(cases):
        what = f"{collective} of {reports.show_size(size)}"
        shown.show(number, len(cases), f"measuring {what}")
        able = []
        for name in names:
            slow = (name, collective) in left_out
            seconds = jobs.turn(name, number * len(ACTS) + ACTS.index("leave" if slow else "try"))
            if seconds > PATIENCE:  # or something else had the processor
                seconds = min(seconds, jobs.turn(name, number * len(ACTS) + ACTS.index("single")))
            if seconds > PATIENCE:
                left_out[name, collective] = f"without {name} from {what} on: a call took {seconds:.1f} s"
            elif not math.isnan(seconds):
                able.append(name)
        for way in ways:
            asked = number * len(ACTS) + ACTS.index(way)
            # An equal share of the time for each peer: a slow one acts in some of the rounds.
            share = budget / max(1, len(able))
            least = min(collectives.LEAST_ROUNDS, args.reps)
            rounds = {
                name: max(least, min(args.reps, int(share / seconds)))
                for name, seconds in jobs.warm_up(able, asked).items()
            }
            rows.append(
                {
                    "collective": collective,
                    "way": way,
                    "size": size,
                    "bytes": 4 * Buffers.elements(ranks, size) if size else 0,
                    "rounds": max(rounds.values(), default=0),
                    "seconds": {name: reports.summary(column) for name, column in jobs.measure(rounds, asked).items()},
                }
            )
    shown.close()
    return rows, list(left_out.values())


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


def print_behind(report: dict[str, Any]) -> None:
    """Print the cases in which `ours` takes more than LEAD times as long as the fastest rival, of how many.

    The last column, where Open MPI is first, is the time of `ours` divided by that of Open MPI which is called behind
    torch, as `ours` is.
    """
    lines, cases, ahead_of_called = [], 0, []
    for run in report["runs"]:
        for row in sorted(run["rows"], key=lambda row: row["size"]):
            ours = reports.median(row, "ours")
            rivals = {
                name: times["median"]
                for name, times in row["seconds"].items()
                if name in peers.DEFAULT and name not in ("ours", "floor")
            }
            if ours is None or not rivals:
                continue
            cases += 1
            first = min(rivals, key=rivals.__getitem__)
            if ours > LEAD * rivals[first]:
                case = [row["collective"], str(run["ranks"]), row["way"], reports.show_size(row["size"])]
                times = [reports.show_seconds(ours), first, reports.show_seconds(rivals[first])]
                called = reports.median(row, peers.C10D) if first == "openmpi" else None
                if called:
                    ahead_of_called.append(ours <= LEAD * min({**rivals, first: called}.values()))
                ratios = [f"{ours / rivals[first]:.2f}x", f"{ours / called:.2f}x" if called else "-"]
                lines.append([*case, *times, *ratios])
    if cases:
        print(f"\nours is first, or within {LEAD - 1:.0%} of the first, in {cases - len(lines)} of {cases} cases")
    if lines:
        few = sum(ahead_of_called)
        print("the others" + (f"; in {few} it would be if torch called Open MPI:" if ahead_of_called else ":"))
        head = ["collective", "ranks", "way", "size", "ours", "first", "its time", "ours/first", f"ours/{peers.C10D}"]
        reports.print_table(head, lines)


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
    print_behind(report)
    if args.plot:
        scaffold.plot_collectives(report, args.plot)
    return 0 if not args.check or check(report) else 1


if __name__ == "__main__":
    scaffold.start(main, rank_main)
