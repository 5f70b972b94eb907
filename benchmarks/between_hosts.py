"""Compares `ours` with Gloo between hosts.

    python benchmarks/between_hosts.py --check
    python benchmarks/between_hosts.py --check --congestion-control system
    python benchmarks/between_hosts.py --hosts 2,4,8 --local 1 --mbit 200 --sizes 64K,1M --variants ours,gloo
    python benchmarks/between_hosts.py --hosts 2,3,4 --variants ring,direct --json r.json   # for scale.py --check

The hosts are network namespaces of this machine with a link each to a bridge, limited to --mbit Mbit/s (0: as fast as
the machine is); that takes root and iproute2. Each variant has hosts and processes of its own, and they take turns
(turns.py), so all of them see the same machine. An all-reduce of float32 is timed, and then the bytes that each host
sends for one are counted at its interface. An all-reduce of S bytes among H hosts must send 2 (H - 1) / H S bytes from
each: the share of the line rate is the time that these take at the rate of the link, over the time taken.

`--check` measures what TARGETS need, and exits with 1 if one is missed.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import scaffold
import torch
import torch.distributed as dist
import turns

from ourddp.bench import harness
from ourddp.bench import report as reports

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "support"))
import hosts as networks

LEAST_ROUNDS, MOST_ROUNDS = 11, 200
WARM_UPS = 3


@dataclass(frozen=True)
class Variant:
    """A backend and its settings."""

    backend: str
    environment: dict[str, str]
    in_heap: bool = False  #: the tensor lies in memory that the backend allocated
    flat: bool = False  #: ranks of one host share no memory
    server: bool = False  #: all tensors go to rank 0, which adds them up, and back
    links: int = 1  #: of each host


VARIANTS = {
    "ours": Variant("ours", {}),
    "heap": Variant("ours", {}, in_heap=True),
    "bfloat16": Variant("ours", {"OURS_WIRE_DTYPE": "bfloat16"}),
    "gloo": Variant("gloo", {}),
    "reno": Variant("ours", {"OURS_TCP_CONGESTION": "reno"}),
    "two streams": Variant("ours", {"OURS_TCP_STREAMS": "2"}),
    "four streams": Variant("ours", {"OURS_TCP_STREAMS": "4"}),
    "by gloo": Variant("ours", {"OURS_INTERNODE": "gloo"}),
    "by two links": Variant("ours", {"OURS_INTERFACE": "eth0,eth1"}, links=2),
    "gloo by two links": Variant("gloo", {"GLOO_SOCKET_IFNAME": "eth0,eth1"}, links=2),
    # What scale.py predicts.
    "whole": Variant("ours", {"OURS_SELECT": "all whole"}),
    "doubling": Variant("ours", {"OURS_SELECT": "all doubling"}),
    "direct": Variant("ours", {"OURS_SELECT": "all direct"}),
    "ring": Variant("ours", {"OURS_SELECT": "all ring"}),
    "flat ring": Variant("ours", {"OURS_SELECT": "all ring"}, flat=True),
    "parameter server": Variant("ours", {}, server=True),
}
DEFAULT_VARIANTS = ("ours", "heap", "bfloat16", "gloo")


@dataclass(frozen=True)
class Target:
    """What a variant with 2 ranks a host has to reach: a share of the line rate, or a multiple of a peer's speed."""

    hosts: int
    mbit: int
    size: str
    variant: str
    least: float
    peer: str = ""  #: empty: `least` is a share of the line rate


TARGETS = (
    Target(2, 1000, "25M", "ours", 0.93),
    Target(2, 1000, "25M", "ours", 1.4, "gloo"),
    Target(2, 1000, "25M", "bfloat16", 2.7, "gloo"),
    Target(4, 1000, "25M", "ours", 0.93),
    Target(4, 1000, "25M", "ours", 1.1, "gloo"),
    Target(2, 0, "25M", "ours", 2.0, "gloo"),
    Target(2, 0, "64K", "ours", 3.0, "gloo"),
)
MOST_EXTRA_BYTES = 0.03  # of what hosts must send


def parse_arguments() -> argparse.Namespace:
    """Return the checked command line."""
    parser = scaffold.argument_parser(__doc__, seconds=20, of=", per row")
    parser.add_argument("--hosts", default="2", help="numbers of hosts, as 2,4")
    parser.add_argument("--local", type=int, default=2, help="ranks on each host")
    parser.add_argument("--mbit", default="1000", help="rates of links in Mbit/s, 0 for no limit, as 1000,0")
    parser.add_argument("--queue", default="256kb,20ms", help="how much a link takes in at once, and for how long")
    parser.add_argument(
        "--congestion-control",
        default=",".join(networks.COMMON),
        help="of the hosts: the first of these that the machine allows; system: its own",
    )
    parser.add_argument("--sizes", default="64K,25M", help="sizes of the tensor")
    parser.add_argument("--variants", default=",".join(DEFAULT_VARIANTS), help=f"of {', '.join(VARIANTS)}")
    parser.add_argument("--check", action="store_true", help="measure what TARGETS need, and exit 1 if one is missed")
    args = parser.parse_args()
    scaffold.require_known(parser, args.variants, VARIANTS)
    if args.local < 1 or args.time_budget <= 0:
        parser.error("--local and --time-budget must be positive")
    return args


def rank_main() -> None:
    """Reduce whenever it is this job's turn; rank 0 reports what the hosts sent for one call."""
    plan = harness.read_plan()
    rank = int(os.environ["RANK"])
    host = networks.Host(**plan["places"][rank])
    host.enter()
    variant = VARIANTS[plan["variant"]]
    name = f"{host.name}, rank {rank}" if variant.flat else host.name
    node = {"OURS_NODE_ID": name, "OURS_INTERFACE": "eth0", "GLOO_SOCKET_IFNAME": "eth0"}
    os.environ.update({**node, **variant.environment})
    with harness.StartedRanks() as ranks:
        group = ranks.group(variant.backend)
        tensor = torch.empty(plan["size"] // 4)
        if variant.in_heap:
            backend = group._get_backend(torch.device("cpu"))
            tensor = backend.allocate_tensor(tensor.numel(), dtype=tensor.dtype, device=tensor.device)
        action = (
            through_server(ranks, tensor, group) if variant.server else partial(dist.all_reduce, tensor, group=group)
        )
        check_sum(ranks, tensor, action)
        turns.take_turns(ranks, action)
        ranks.report = {"sent": count_sent(ranks, action, variant.links)}


def through_server(ranks: harness.Ranks, tensor: torch.Tensor, group: dist.ProcessGroup) -> Callable[[], object]:
    """Return a call that adds up all ranks' tensors on rank 0, and sends the sum to all."""
    all_of_them = [torch.empty_like(tensor) for _ in range(ranks.size)] if ranks.rank == 0 else None

    def act() -> None:
        dist.gather(tensor, all_of_them, group_dst=0, group=group)
        for other in (all_of_them or [])[1:]:
            tensor.add_(other)
        dist.scatter(tensor, [tensor] * ranks.size if ranks.rank == 0 else None, group_src=0, group=group)

    return act


def check_sum(ranks: harness.Ranks, tensor: torch.Tensor, action: Callable[[], object]) -> None:
    """Raise RuntimeError unless the action adds up; leave a tensor of zeros, which stays so."""
    for _ in range(WARM_UPS):
        tensor.fill_(ranks.rank + 1)
        action()
        if not bool(tensor.eq(ranks.size * (ranks.size + 1) / 2).all()):
            raise RuntimeError("the sum is wrong")
    tensor.zero_()


def count_sent(ranks: harness.Ranks, action: Callable[[], object], links: int) -> list[int]:
    """Return the bytes that the host of each rank sends for `action`."""

    def sent_by_host() -> int:
        return sum(networks.bytes_sent(f"eth{link}") for link in range(links))

    dist.barrier()
    ranks.together()
    before = sent_by_host()
    ranks.together()
    action()
    ranks.together()
    sent: list[int] = [0] * ranks.size
    mine = sent_by_host() - before
    ranks.together()
    dist.all_gather_object(sent, mine)
    return sent


def measure(made: dict[str, list[networks.Host]], mbit: int, size: int, args: argparse.Namespace) -> dict[str, Any]:
    """Return the row of one size between each variant's hosts."""
    count = len(next(iter(made.values())))
    ranks = count * args.local
    plans = {
        name: {"variant": name, "size": size, "places": [asdict(hosts[rank // args.local]) for rank in range(ranks)]}
        for name, hosts in made.items()
    }
    jobs, times = turns.run_in_turns(
        [__file__],
        plans,
        ranks,
        budget=args.time_budget,
        least=LEAST_ROUNDS,
        most=MOST_ROUNDS,
        timeout=300 + 4 * args.time_budget,
    )
    return {
        "hosts": count,
        "local": args.local,
        "mbit": mbit,
        "congestion_control": next(iter(made.values()))[0].congestion_control,
        "queue": args.queue,
        "size": size,
        "rounds": len(next(iter(times.values()))),
        "seconds": {name: reports.summary(column) for name, column in times.items()},
        "sent": {name: jobs[name]["sent"][:: args.local] for name in plans},
    }


def least_bytes(row: dict[str, Any]) -> float:
    """Return what each host has to send."""
    return 2 * (row["hosts"] - 1) / row["hosts"] * row["size"]


def line_rate_share(row: dict[str, Any], variant: str) -> float:
    """Return the share of the link's rate that the necessary bytes had, or 0 if the link has no limit."""
    seconds = reports.median(row, variant)
    assert seconds is not None
    return least_bytes(row) * 8 / (row["mbit"] * 1e6) / seconds if row["mbit"] else 0.0


def print_row(row: dict[str, Any]) -> None:
    """Print a table of one size between hosts."""
    rate = f"links of {row['mbit']} Mbit/s" if row["mbit"] else "links without a limit"
    shape = f"{row['hosts']} hosts of {row['local']} ranks, {row['congestion_control']}"
    print(f"\nall_reduce of {reports.show_size(row['size'])}, {shape}, {rate}, median of {row['rounds']}")
    gloo = reports.median(row, "gloo")
    lines = []
    for variant in row["seconds"]:
        seconds = reports.median(row, variant)
        share = f"{line_rate_share(row, variant):.1%}" if row["mbit"] else "-"
        sent = f"{max(row['sent'][variant]) / least_bytes(row):.2%}"
        faster = f"{gloo / seconds:.2f}x" if gloo and seconds else "-"
        lines.append([variant, reports.show_seconds(seconds), share, sent, faster])
    reports.print_table(["variant", "time", "of the line rate", "bytes of the least", "gloo/variant"], lines)


def measure_all(shapes: dict[tuple[int, int], list[int]], args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return, and print, the rows of all sizes for each number of hosts and each rate of links."""
    rows = []
    for (count, mbit), sizes in shapes.items():
        with contextlib.ExitStack() as stack:
            variants = args.variants.split(",")
            controls = [] if args.congestion_control == "system" else args.congestion_control.split(",")
            link = (count, mbit, networks.Queue(*args.queue.split(",")), controls)
            made = {
                name: stack.enter_context(networks.linked_hosts(*link, links=VARIANTS[name].links)) for name in variants
            }
            for size in sizes:
                rows.append(measure(made, mbit, size, args))
                print_row(rows[-1])
    return rows


def check(rows: list[dict[str, Any]]) -> bool:
    """Print for each target how the measurement compares; return whether all are met."""
    verdicts = [judge(rows, target) for target in TARGETS]
    # Of small messages, headers are a large part.
    verdicts += [judge_bytes(row) for row in rows if row["size"] >= 1 << 20]
    print()
    for met, text in verdicts:
        print(f"{'met   ' if met else 'MISSED'} {text}")
    return all(met for met, _ in verdicts)


def case_of(hosts: int, mbit: int, size: int) -> str:
    """Return what was measured, in words."""
    return f"{hosts} hosts, {mbit or 'unlimited'} Mbit/s, {reports.show_size(size)}"


def judge(rows: list[dict[str, Any]], target: Target) -> tuple[bool, str]:
    """Return whether the target is met, and how it compares."""
    case = (target.hosts, target.mbit, reports.parse_size(target.size))
    (row,) = (row for row in rows if (row["hosts"], row["mbit"], row["size"]) == case)
    seconds, peer = reports.median(row, target.variant), reports.median(row, target.peer)
    assert seconds is not None
    value = peer / seconds if peer else line_rate_share(row, target.variant)
    what = f"times as fast as {target.peer}" if peer else "of the line rate"
    text = f"{case_of(*case)}, {target.variant}: {value:.3g} {what}, at least {target.least:g} asked"
    return value >= target.least, text


def judge_bytes(row: dict[str, Any]) -> tuple[bool, str]:
    """Return whether hosts sent little more than they had to, and how much that was."""
    extra = max(row["sent"]["ours"]) / least_bytes(row) - 1
    text = f"{extra:+.2%} bytes beside the least, {MOST_EXTRA_BYTES:.0%} allowed"
    return abs(extra) <= MOST_EXTRA_BYTES, f"{case_of(row['hosts'], row['mbit'], row['size'])}, ours: {text}"


def main() -> int:
    """Measure and report; return the exit status."""
    args = parse_arguments()
    reason = networks.why_no_hosts()
    if reason:
        print(reason, file=sys.stderr)
        return 2
    shapes: dict[tuple[int, int], list[int]] = {}
    if args.check:
        args.local, args.variants = 2, ",".join(DEFAULT_VARIANTS)
        for target in TARGETS:
            sizes = shapes.setdefault((target.hosts, target.mbit), [])
            if reports.parse_size(target.size) not in sizes:
                sizes.append(reports.parse_size(target.size))
    else:
        sizes = [reports.parse_size(size) for size in args.sizes.split(",")]
        shapes = {(int(h), int(m)): sizes for h in args.hosts.split(",") for m in args.mbit.split(",")}
    rows = measure_all(shapes, args)
    if args.json:
        report = {"machine": args.machine, "torch": torch.__version__, "rows": rows}
        scaffold.write_json(report, args.json)
    return 0 if not args.check or check(rows) else 1


if __name__ == "__main__":
    scaffold.start(main, rank_main)
