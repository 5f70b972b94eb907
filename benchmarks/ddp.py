"""Times training steps: without communication, and with either DistributedDataParallel over either backend.

    python benchmarks/ddp.py --ranks 4 --plot ddp.png

The program starts its own ranks. Every variant has processes of its own, as a training run has, since what memory costs
a step depends on what else the process has done. They all run at once and take turns: one step of each, then the next
round. `local` is the same step with no gradients exchanged, in just as many processes at the same time, so that
`efficiency`, local / variant, tells what communication costs and not what sharing the cores does. A step is forward,
backward and an SGD update, on one thread a rank; it lasts until the last rank has ended it. The first step of every
variant has to give the same gradients.

By default glibc returns large tensors to the system when they are freed, so that the next ones cost page faults; `ours`
keeps those of gradients. With --keep-memory nothing is returned, and what is left is communication alone.
`--reducer-overhead` takes a model of 1,000 parameters of 1 KiB and hardly any computation: what is left is the price
of a parameter.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import scaffold
import torch
import torch.distributed as dist
import turns
from torch import nn

from ourddp.bench import harness
from ourddp.bench import report as reports
from ourddp.bench.steps import MODELS, VARIANTS, WARM_UPS, check_alike, training_step, wrap

LEAST_ROUNDS = 5
KEEP_MEMORY = f"glibc.malloc.mmap_threshold={1 << 40}:glibc.malloc.trim_threshold={1 << 40}"
ON_CPUS = [name for name, (_, backend, _) in VARIANTS.items() if backend != "nccl"]
DEFAULT_VARIANTS = ("local", "torch+gloo", "torch+ours", "ourddp+ours")


def parse_arguments() -> argparse.Namespace:
    """Return the checked command line."""
    parser = scaffold.argument_parser(__doc__, seconds=120, of=", per number of ranks", picture=True)
    parser.add_argument("--ranks", default="4", help="numbers of ranks, as 2,4")
    parser.add_argument("--models", default="mlp,cnn,transformer", help=f"of {', '.join(MODELS)}")
    parser.add_argument("--variants", default=",".join(DEFAULT_VARIANTS), help=f"of {', '.join(ON_CPUS)}")
    parser.add_argument("--reps", type=int, default=50, help="most steps of a variant")
    parser.add_argument("--reducer-overhead", action="store_true", help="only the model of 1,000 parameters of 1 KiB")
    parser.add_argument(
        "--keep-memory", action="store_true", help="the C library returns no memory to the system, in all variants"
    )
    args = parser.parse_args()
    if args.reducer_overhead:
        args.models = "many-small"
    scaffold.require_known(parser, args.models, MODELS)
    scaffold.require_known(parser, args.variants, ON_CPUS)
    if args.reps < 1 or args.time_budget <= 0:
        parser.error("--reps and --time-budget must be positive")
    return args


def first_step(model: nn.Module, action: Callable[[], None], path: Path | None, rank: int) -> None:
    """Do a step, check that all ranks have the same gradients then, and leave rank 0's in `path`."""
    action()
    if path is None:
        return
    gradient = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    reference = gradient.clone()
    dist.broadcast(reference, src=0)
    check_alike(gradient, reference, f"rank {rank} are not those of rank 0")
    if rank == 0:
        torch.save(gradient, path)


def rank_main() -> None:
    """Train as the plan says whenever it is this job's turn; rank 0 reports what was trained."""
    with harness.StartedRanks() as ranks:
        variant, name = ranks.plan["variant"], ranks.plan["model"]
        backend = VARIANTS[variant][1]
        groups = {backend: ranks.group(backend)} if backend else {}
        torch.manual_seed(0)
        model, inputs = MODELS[name]()
        torch.manual_seed(1 + ranks.rank)  # every rank has data of its own
        inputs = torch.randn_like(inputs)
        parameters = list(model.parameters())
        model = wrap(model, variant, groups)
        action = training_step(model, inputs)
        first_step(model, action, Path(ranks.plan["gradient"]) if backend else None, ranks.rank)
        for _ in range(WARM_UPS):
            action()
        ranks.report = {
            "parameters": len(parameters),
            "bytes": sum(parameter.nbytes for parameter in parameters),
        }
        if VARIANTS[variant][2].get("bucket_cap_mb") == "auto":
            ranks.report["chosen_bucket_bytes"] = model.report().tuning.cap
        turns.take_turns(ranks, action)


def measure(name: str, variants: list[str], ranks: int, args: argparse.Namespace) -> dict[str, Any]:
    """Return the row of one model."""
    budget = args.time_budget / len(args.models.split(","))
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        gradients = {variant: Path(folder) / f"{place}.pt" for place, variant in enumerate(variants)}
        plans = {
            variant: {"variant": variant, "model": name, "gradient": str(path)} for variant, path in gradients.items()
        }
        least, most = min(LEAST_ROUNDS, args.reps), args.reps
        jobs, times = turns.run_in_turns(
            [__file__], plans, ranks, budget=budget, least=least, most=most, timeout=300 + 4 * budget
        )
        exchanged = [variant for variant in variants if VARIANTS[variant][1]]
        for variant in exchanged[1:]:
            gradient, reference = (torch.load(gradients[which]) for which in (variant, exchanged[0]))
            check_alike(gradient, reference, f"{variant} are not those of {exchanged[0]}")
    chosen = "chosen_bucket_bytes"
    return {
        "model": name,
        "parameters": jobs[variants[0]]["parameters"],
        "bytes": jobs[variants[0]]["bytes"],
        chosen: {variant: job[chosen] for variant, job in jobs.items() if chosen in job},
        "rounds": len(times[variants[0]]),
        "seconds": {variant: reports.summary(column) for variant, column in times.items()},
    }


def print_run(run: dict[str, Any]) -> None:
    """Print a table for each model of a run."""
    for row in run["rows"]:
        reports.print_steps(row, run["ranks"])
        for variant, size in row.get("chosen_bucket_bytes", {}).items():
            print(f"{variant} chose buckets of {reports.show_size(size)}")


def plot(report: dict[str, Any], path: Path) -> None:
    """Draw step times as bars, a row of panels for each number of ranks, each bar with its efficiency."""
    panels = [(run, row) for run in report["runs"] for row in run["rows"]]
    rows, columns = len(report["runs"]), max(len(run["rows"]) for run in report["runs"])
    title = f"Step time and efficiency, {reports.source_of(report)}"
    with reports.picture(path, title, rows, columns, 3.8) as axes:
        for axis, (run, row) in zip(axes, panels, strict=True):
            reports.draw_steps(axis, row, run["ranks"])


def main() -> int:
    """Measure and report; return the exit status."""
    args = parse_arguments()
    models, variants = args.models.split(","), args.variants.split(",")
    if args.keep_memory:
        os.environ["GLIBC_TUNABLES"] = KEEP_MEMORY
    report: dict[str, Any] = {"machine": args.machine, "torch": torch.__version__, "runs": []}
    report["keeps_memory"] = args.keep_memory
    for ranks in map(int, args.ranks.split(",")):
        rows = [measure(name, variants, ranks, args) for name in models]
        report["runs"].append({"ranks": ranks, "variants": variants, "rows": rows})
        print_run(report["runs"][-1])
    if args.json:
        scaffold.write_json(report, args.json)
    if args.plot:
        plot(report, args.plot)
    return 0


if __name__ == "__main__":
    scaffold.start(main, rank_main)
