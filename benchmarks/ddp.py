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
import importlib.util
import os
import tempfile
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import harness
import report as reports
import torch
import torch.distributed as dist
import turns
from torch import nn

LEAST_ROUNDS = 5
WARM_UPS = 4  # buckets are assigned anew in the second step, and with "auto" in the fourth
VARIANTS: dict[str, tuple[str, str, dict[str, Any]]] = {  # name: (whose DistributedDataParallel, backend, arguments)
    "local": ("", "", {}),
    "torch+gloo": ("torch", "gloo", {}),
    "torch+ours": ("torch", "ours", {}),
    "ourddp+gloo": ("ours", "gloo", {}),
    "ourddp+ours": ("ours", "ours", {}),
    "ourddp+auto": ("ours", "ours", {"bucket_cap_mb": "auto"}),
    "ourddp+views": ("ours", "ours", {"gradient_as_bucket_view": True}),
}
KEEP_MEMORY = f"glibc.malloc.mmap_threshold={1 << 40}:glibc.malloc.trim_threshold={1 << 40}"
DEFAULT_VARIANTS = ("local", "torch+gloo", "torch+ours", "ourddp+ours")


class ManySmall(nn.Module):
    """1,000 parameters of 1 KiB, each used once."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ParameterList(torch.randn(256) for _ in range(1000))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Map inputs (N, 1) to (N, 256000)."""
        return inputs * torch.cat(list(self.parts))


def mlp() -> tuple[nn.Module, torch.Tensor]:
    """Return a perceptron with 50 MB of gradients and a batch of 32."""
    widths = (1024, 2048, 2048, 2048, 1000)
    layers: list[nn.Module] = []
    for width, following in pairwise(widths):
        layers += [nn.Linear(width, following), nn.ReLU()]
    return nn.Sequential(*layers[:-1]), torch.randn(32, 1024)


def cnn() -> tuple[nn.Module, torch.Tensor]:
    """Return a convolutional network with 19 MB of gradients and 8 images of 32x32."""
    layers: list[nn.Module] = []
    channels = 3
    for width, repeats in ((64, 1), (128, 2), (256, 2), (512, 2)):
        for _ in range(repeats):
            layers += [nn.Conv2d(channels, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()]
            channels = width
        layers.append(nn.MaxPool2d(2))
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(512 * 2 * 2, 100)), torch.randn(8, 3, 32, 32)


def transformer() -> tuple[nn.Module, torch.Tensor]:
    """Return a transformer of six layers with 43 MB of gradients and 4 sequences of 32."""
    layer = nn.TransformerEncoderLayer(384, 6, 1536, dropout=0.0, batch_first=True, norm_first=True)
    return nn.TransformerEncoder(layer, 6, enable_nested_tensor=False), torch.randn(4, 32, 384)


def many_small() -> tuple[nn.Module, torch.Tensor]:
    """Return the model of --reducer-overhead."""
    return ManySmall(), torch.randn(1, 1)


MODELS = {"mlp": mlp, "cnn": cnn, "transformer": transformer, "many-small": many_small}


def parse_arguments() -> argparse.Namespace:
    """Return the checked command line."""
    parser = harness.argument_parser(__doc__, seconds=120, of=", per number of ranks", picture=True)
    parser.add_argument("--ranks", default="4", help="numbers of ranks, as 2,4")
    parser.add_argument("--models", default="mlp,cnn,transformer", help=f"of {', '.join(MODELS)}")
    parser.add_argument(
        "--variants", help=f"of {', '.join(VARIANTS)}; default: {', '.join(DEFAULT_VARIANTS)}, as installed"
    )
    parser.add_argument("--reps", type=int, default=50, help="most steps of a variant")
    parser.add_argument("--reducer-overhead", action="store_true", help="only the model of 1,000 parameters of 1 KiB")
    parser.add_argument(
        "--keep-memory", action="store_true", help="the C library returns no memory to the system, in all variants"
    )
    args = parser.parse_args()
    if args.reducer_overhead:
        args.models = "many-small"
    if args.variants is None:
        installed = importlib.util.find_spec("ourddp") is not None
        args.variants = ",".join(name for name in DEFAULT_VARIANTS if installed or "our" not in name)
    harness.require_known(parser, args.models, MODELS)
    harness.require_known(parser, args.variants, VARIANTS)
    if args.reps < 1 or args.time_budget <= 0:
        parser.error("--reps and --time-budget must be positive")
    return args


def wrap(model: nn.Module, variant: str, groups: dict[str, dist.ProcessGroup]) -> nn.Module:
    """Return the model as the variant trains it."""
    whose, backend, arguments = VARIANTS[variant]
    if not whose:
        return model
    if whose == "torch":
        return nn.parallel.DistributedDataParallel(model, process_group=groups[backend], **arguments)
    import ourddp

    return ourddp.DistributedDataParallel(model, process_group=groups[backend], **arguments)


def training_step(model: nn.Module, inputs: torch.Tensor) -> Callable[[], None]:
    """Return a function that does one training step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step() -> None:
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()

    return step


def check_alike(gradient: torch.Tensor, reference: torch.Tensor, whose: str) -> None:
    """Raise RuntimeError if a step's gradients are not those of the reference."""
    apart = (gradient - reference).abs().max() / reference.abs().max()
    if not apart < 1e-4:
        raise RuntimeError(f"the gradients of {whose}: {apart}")


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
    with harness.Ranks() as ranks:
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
            "bytes": sum(parameter.numel() * parameter.element_size() for parameter in parameters),
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
            __file__, plans, ranks, budget=budget, least=least, most=most, timeout=300 + 4 * budget
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
        size = f"{row['bytes'] / 1e6:.1f} MB in {row['parameters']:,} parameters"
        print(f"\n{row['model']}, {size}, {run['ranks']} ranks, median of {row['rounds']} steps")
        local = reports.median(row, "local")
        lines = []
        for variant in run["variants"]:
            step = reports.median(row, variant)
            cells = [variant, reports.show_seconds(step)]
            if local and step:
                per_parameter = (step - local) / row["parameters"] * 1e6
                cells += [f"{local / step:.0%}", reports.show_seconds(step - local), f"{per_parameter:.2f} us"]
            lines.append(cells + ["-"] * (5 - len(cells)))
        header = ["variant", "step", "efficiency", "over local", "per parameter"]
        shown = len(header) if row["model"] == "many-small" else len(header) - 1
        reports.print_table(header[:shown], [line[:shown] for line in lines])
        for variant, size in row.get("chosen_bucket_bytes", {}).items():
            print(f"{variant} chose buckets of {reports.show_size(size)}")


def plot(report: dict[str, Any], path: Path) -> None:
    """Draw step times as bars, a row of panels for each number of ranks, each bar with its efficiency."""
    panels = [(run, row) for run in report["runs"] for row in run["rows"]]
    rows, columns = len(report["runs"]), max(len(run["rows"]) for run in report["runs"])
    title = f"Step time and efficiency, {reports.source_of(report)}"
    with reports.picture(path, title, rows, columns, 3.8) as axes:
        for axis, (run, row) in zip(axes, panels, strict=True):
            _draw(axis, run, row)


def _draw(axis: Any, run: dict[str, Any], row: dict[str, Any]) -> None:
    variants = run["variants"]
    steps = [row["seconds"][variant]["median"] * 1e3 for variant in variants]
    bars = axis.bar(variants, steps, color=[f"C{list(VARIANTS).index(variant)}" for variant in variants])
    local = reports.median(row, "local")
    labels = [f"{step:.1f}" + (f"\n{local * 1e3 / step:.0%}" if local else "") for step in steps]
    axis.bar_label(bars, labels, fontsize=8)
    axis.margins(y=0.2)
    axis.tick_params(axis="x", labelrotation=20, labelsize=8)
    axis.set_ylabel("milliseconds a step")
    axis.set_title(f"{row['model']}, {row['bytes'] / 1e6:.0f} MB, {run['ranks']} ranks", fontsize=10)


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
        reports.write_json(report, args.json)
    if args.plot:
        plot(report, args.plot)
    return 0


if __name__ == "__main__":
    harness.start(main, rank_main)
