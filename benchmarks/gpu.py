"""Compares `ours` with Gloo and NCCL on tensors of GPUs, which ranks may share, and with what the memory allows.

    python benchmarks/gpu.py --check --json gpu.json
    python benchmarks/gpu.py --ranks 2 --parts all_reduce --sizes 1M,100M

First the GPU's memory is measured with torch's copy_, in bytes read and written a second. An all-reduce of S bytes
among P ranks of one GPU has to read and write S bytes for each: its floor is the time of 2 P S bytes. Then all-reduce
is timed, and at last a transformer is trained under bfloat16 autocast. NCCL takes part where it works: where ranks
share a GPU, as far as its version has NCCL_MULTI_RANK_GPU_ENABLE.

`--check` measures what TARGETS need, and exits with 1 if one is missed. Without a GPU the exit status is 2; `--device
cpu` tries the program out.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

import gpu_parts as parts
import scaffold
import torch

from ourddp.bench import harness
from ourddp.bench import report as reports
from ourddp.progress import Progress

PARTS = ("all_reduce", "ddp")
SIZES = "64K,1M,16M,100M,256M"
PROBE_TIMEOUT = 90
# That TARGETS are for.
CHECKED_RANKS = 4


@dataclass(frozen=True)
class Target:
    """What is asked: a number of a row is to be at least, or at most, so much."""

    part: str
    what: str
    bound: float
    at_most: bool = False


TARGETS = (
    # The copies into the stages and out of them alone make it 2.6 for four ranks on one GPU. The rest is that their
    # processes take turns: on an H200 it is 10.6, and 4.2 under MPS, where they do not.
    Target("all_reduce", "100M: ours over the floor", 15.0, at_most=True),
    Target("all_reduce", "100M: gloo over ours", 20.0),
    Target("ddp", "torch+gloo over ourddp+ours", 2.0),
    Target("ddp", "ourddp+ours, distance from one process", parts.MOST_APART, at_most=True),
)


def parse_arguments() -> argparse.Namespace:
    """Return the checked command line."""
    parser = scaffold.argument_parser(__doc__, seconds=100)
    parser.add_argument("--ranks", type=int, default=CHECKED_RANKS, help="how many; they share the GPUs that there are")
    parser.add_argument("--parts", default=",".join(PARTS), help=f"of {', '.join(PARTS)}")
    parser.add_argument("--sizes", default=SIZES, help="of all-reduce")
    parser.add_argument("--layers", type=int, default=8, help="of the transformer")
    parser.add_argument("--width", type=int, default=1024, help="of the transformer, a multiple of 64")
    parser.add_argument("--device", default="cuda", help="cpu: only to try the program out")
    parser.add_argument("--check", action="store_true", help="measure what TARGETS need, and exit 1 if one is missed")
    args = parser.parse_args()
    scaffold.require_known(parser, args.parts, PARTS)
    if args.check and args.ranks != CHECKED_RANKS:
        parser.error(f"--check is for {CHECKED_RANKS} ranks")
    if args.ranks < 2 or args.time_budget <= 0:
        parser.error("--ranks must be at least 2, and --time-budget positive")
    return args


def describe_device(device: str) -> dict[str, Any]:
    """Return which device was measured, and with which versions."""
    found: dict[str, Any] = {"torch": torch.__version__, "device": device}
    if device != "cuda":
        return found
    found["device"] = torch.cuda.get_device_name(0)
    found["devices"] = torch.cuda.device_count()
    found["cuda"] = torch.version.cuda
    query = shutil.which("nvidia-smi")
    if query:
        command = [query, "--query-gpu=driver_version", "--format=csv,noheader"]
        answer = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        found["driver"] = answer.stdout.split("\n")[0].strip()
    if torch.distributed.is_nccl_available():
        found["nccl"] = ".".join(str(number) for number in torch.cuda.nccl.version())
    return found


# --- in the ranks ----------------------------------------------------------------------------------------------------


def rank_main() -> None:
    """Measure one part of the plan."""
    plan = harness.read_plan()
    with harness.StartedRanks() as ranks:
        accelerator = parts.Accelerator(plan["device"], ranks.rank)
        if plan["part"] == "nccl":
            ranks.report = parts.why_no_nccl(ranks, accelerator)
        elif plan["part"] == "all_reduce":
            ranks.report = rank_all_reduce(ranks, accelerator)
        else:
            ranks.report = parts.measure_training(ranks, accelerator, plan["variants"], plan["budget"])


def rank_all_reduce(ranks: harness.Ranks, accelerator: parts.Accelerator) -> dict[str, Any]:
    """Return the memory's speed and the rows of all sizes."""
    plan = ranks.plan
    speed = parts.alone(ranks, lambda: parts.measure_copies(accelerator, plan["copied"]))
    groups = {backend: ranks.group(backend) for backend in plan["backends"]}
    rows = []
    shown = Progress(sys.stderr if ranks.rank == 0 else None)
    for number, size in enumerate(plan["sizes"]):
        shown.show(number, len(plan["sizes"]), f"measuring all_reduce of {reports.show_size(size)}")
        budget = plan["budget"] / len(plan["sizes"])
        rows.append(parts.measure_all_reduce(ranks, accelerator, groups, size, budget))
    shown.close()
    return {"copied_bytes_per_second": speed, "rows": rows}


# --- outside of them -------------------------------------------------------------------------------------------------


def run_part(part: str, args: argparse.Namespace, timeout: float | None = None, **plan: Any) -> Any:
    """Return what the ranks report of a part."""
    whole = {"part": part, "device": args.device, "layers": args.layers, "width": args.width, **plan}
    return harness.run_ranks([__file__], whole, args.ranks, timeout=timeout or 240 + 2 * args.time_budget)


def why_no_nccl(args: argparse.Namespace) -> str:
    """Return why NCCL takes no part, or nothing."""
    if args.device != "cuda" or not torch.distributed.is_nccl_available():
        return "there is no GPU that it could use" if args.device != "cuda" else "this torch has none"
    if args.ranks > torch.cuda.device_count():
        os.environ.setdefault("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    try:
        return str(run_part("nccl", args, timeout=PROBE_TIMEOUT))
    except RuntimeError as error:
        return str(error)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Return, and print, the report of all parts."""
    chosen = args.parts.split(",")
    report: dict[str, Any] = {"machine": args.machine, **describe_device(args.device), "ranks": args.ranks}
    report["why_no_nccl"] = why_no_nccl(args)
    print(f"{report['device']}, {args.ranks} ranks, torch {report['torch']}")
    if report["why_no_nccl"]:
        print(f"without NCCL: {report['why_no_nccl']}")
    nccl = [] if report["why_no_nccl"] else ["nccl"]
    budget = args.time_budget / len(chosen)
    if "all_reduce" in chosen:
        sizes = [reports.parse_size(size) for size in args.sizes.split(",")]
        copied = parts.COPIED_BYTES if args.device == "cuda" else 16 << 20
        plan = {"sizes": sizes, "backends": ["ours", "gloo", *nccl], "budget": budget, "copied": copied}
        report["all_reduce"] = run_part("all_reduce", args, **plan)
        add_floors(report)
        print_all_reduce(report["all_reduce"])
    if "ddp" in chosen:
        variants = ["ourddp+ours", "ourddp+ours+auto", "torch+gloo", *(f"torch+{name}" for name in nccl)]
        report["ddp"] = run_part("ddp", args, variants=variants, budget=budget)
        print_training(report["ddp"])
    return report


def add_floors(report: dict[str, Any]) -> None:
    """Add to each row what the memory of a GPU needs for it."""
    sharing = -(-report["ranks"] // report.get("devices", 1))
    for row in report["all_reduce"]["rows"]:
        row["floor"] = 2 * sharing * row["size"] / report["all_reduce"]["copied_bytes_per_second"]


def print_all_reduce(found: dict[str, Any]) -> None:
    """Print the time of each variant, and how that compares with the floor."""
    print(f"\nall_reduce; the memory copies {found['copied_bytes_per_second'] / 1e9:.0f} GB/s, read and written")
    names = list(dict.fromkeys(name for row in found["rows"] for name in row["seconds"]))
    lines = []
    for row in found["rows"]:
        times = [reports.median(row, name) for name in names]
        cells = [f"{reports.show_seconds(time)} {time / row['floor']:.2f}x" if time else "-" for time in times]
        lines.append([reports.show_size(row["size"]), reports.show_seconds(row["floor"]), *cells])
    reports.print_table(["size", "floor", *names], lines)


def print_training(row: dict[str, Any]) -> None:
    """Print the steps of each variant."""
    print(f"\ntransformer of {row['parameters'] / 1e6:.0f} million parameters, bfloat16 autocast")
    local = reports.median(row, "local")
    lines = []
    for name in row["seconds"]:
        step = reports.median(row, name)
        apart = row["apart"].get(name)
        distance = "-" if apart is None else f"{apart:.1e}"
        lines.append([name, reports.show_seconds(step), f"{local / step:.0%}" if local and step else "-", distance])
    reports.print_table(["variant", "step", "of local", "from one process"], lines)


def value_of(report: dict[str, Any], target: Target) -> float | None:
    """Return what was measured of the target, or None where it was not measured."""
    if target.part not in report:
        return None
    name = target.what.split(": ")[-1]
    if target.part == "all_reduce":
        size = reports.parse_size(target.what.split(": ")[0])
        (row,) = (row for row in report["all_reduce"]["rows"] if row["size"] == size)
        over, under = name.split(" over ")
        top = reports.median(row, over)
        bottom = row["floor"] if under == "the floor" else reports.median(row, under)
        return top / bottom if top and bottom else None
    if " over " in name:
        slow, fast = (reports.median(report["ddp"], variant) for variant in name.split(" over "))
        return slow / fast if slow and fast else None
    return report["ddp"]["apart"][name.split(",")[0]]


def check(report: dict[str, Any]) -> bool:
    """Print for each target how the measurement compares; return whether all are met."""
    print()
    met = True
    for target in TARGETS:
        value = value_of(report, target)
        if value is None:
            print(f"MISSED {target.part}, {target.what}: not measured")
            met = False
            continue
        good = value <= target.bound if target.at_most else value >= target.bound
        asked = f"at {'most' if target.at_most else 'least'} {target.bound:g} asked"
        print(f"{'met   ' if good else 'MISSED'} {target.part}, {target.what}: {value:.3g}, {asked}")
        met = met and good
    return met


def main() -> int:
    """Measure and report; return the exit status."""
    args = parse_arguments()
    if args.device == "cuda" and not torch.cuda.is_available():
        print(
            "torch finds no GPU here: run this where it does, or try the program out with --device cpu", file=sys.stderr
        )
        return 2
    if args.check:
        args.parts, args.sizes = ",".join(PARTS), SIZES
    report = measure(args)
    if args.json:
        scaffold.write_json(report, args.json)
    return 0 if not args.check or check(report) else 1


if __name__ == "__main__":
    scaffold.start(main, rank_main)
