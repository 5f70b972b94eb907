"""Times training steps: without communication, and with either DistributedDataParallel over either backend.

    python benchmarks/ddp.py --ranks 4 --plot ddp.png

The program starts its own ranks. Every variant has its own copy of the model in every rank, and they take turns: one
step of each, then the next round. `local` is the same step with no gradients exchanged, in just as many processes at
the same time, so that `efficiency`, local / variant, tells what communication costs and not what sharing the cores
does. A step is forward, backward and an SGD update, on one thread a rank; it takes as long as the slowest rank.
Before anything is timed, one step of every variant has to give the same gradients. `--reducer-overhead` takes a model
of 1,000 parameters of 1 KiB and no computation to speak of: what is left is the price of a parameter.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import harness
import report as reports
import torch
import torch.distributed as dist
from torch import nn

LEAST_ROUNDS = 5
WARM_UPS = 4  # buckets are arranged anew in a model's second step, and where their size is chosen in its fourth
VARIANTS: dict[str, tuple[str, str, dict[str, Any]]] = {  # name: (whose DistributedDataParallel, backend, arguments)
    "local": ("", "", {}),
    "torch+gloo": ("torch", "gloo", {}),
    "torch+ours": ("torch", "ours", {}),
    "ourddp+gloo": ("ours", "gloo", {}),
    "ourddp+ours": ("ours", "ours", {}),
    "ourddp+auto": ("ours", "ours", {"bucket_cap_mb": "auto"}),
    "ourddp+views": ("ours", "ours", {"gradient_as_bucket_view": True}),
}
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
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--ranks", default="4", help="numbers of ranks, as 2,4")
    parser.add_argument("--models", default="mlp,cnn,transformer", help=f"of {', '.join(MODELS)}")
    parser.add_argument(
        "--variants", help=f"of {', '.join(VARIANTS)}; default: {', '.join(DEFAULT_VARIANTS)}, as installed"
    )
    parser.add_argument("--reps", type=int, default=50, help="most steps of a variant")
    parser.add_argument(
        "--time-budget", type=float, default=120, help="seconds of measuring, about, per number of ranks"
    )
    parser.add_argument("--reducer-overhead", action="store_true", help="only the model of 1,000 parameters of 1 KiB")
    parser.add_argument("--machine", default=harness.machine(), help="what the results say they were measured on")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the results there")
    parser.add_argument("--plot", type=Path, metavar="PATH", help="write a picture (PNG, SVG or PDF) there")
    args = parser.parse_args()
    if args.reducer_overhead:
        args.models = "many-small"
    if args.variants is None:
        installed = importlib.util.find_spec("ourddp") is not None
        args.variants = ",".join(name for name in DEFAULT_VARIANTS if installed or "our" not in name)
    for known, chosen in ((MODELS, args.models), (VARIANTS, args.variants)):
        unknown = set(chosen.split(",")) - set(known)
        if unknown:
            parser.error(f"there is no {', '.join(sorted(unknown))}; choose from {', '.join(known)}")
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


def check_equal(models: dict[str, nn.Module], rank: int) -> None:
    """Raise RuntimeError where variants that exchange gradients do not have the same ones after a step."""
    gradients = {
        name: torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
        for name, model in models.items()
        if name != "local"
    }
    reference = next(iter(gradients.values()), torch.ones(1))
    for name, gradient in gradients.items():
        apart = (gradient - reference).abs().max() / reference.abs().max()
        if not apart < 1e-4:
            raise RuntimeError(
                f"rank {rank}: the gradients of {name} are not those of {next(iter(gradients))}: {apart}"
            )


def measure(ranks: harness.Ranks, groups: dict[str, dist.ProcessGroup], name: str) -> dict[str, Any]:
    """Return the row of one model."""
    torch.manual_seed(0)
    model, _ = MODELS[name]()
    torch.manual_seed(1 + ranks.rank)  # every rank has data of its own
    inputs = torch.randn_like(MODELS[name]()[1])
    parameters = list(model.parameters())
    models, actions = {}, {}
    for variant in ranks.plan["variants"]:
        models[variant] = wrap(copy.deepcopy(model), variant, groups)
        actions[variant] = training_step(models[variant], inputs)
        actions[variant]()
    check_equal(models, ranks.rank)
    for action in actions.values():
        for _ in range(WARM_UPS):
            action()
    chosen = {
        variant: models[variant].report().tuning.cap
        for variant in models
        if VARIANTS[variant][2].get("bucket_cap_mb") == "auto"
    }
    plan = ranks.plan
    least = min(LEAST_ROUNDS, plan["reps"])
    times = ranks.measure(actions, budget=plan["seconds_per_case"], least=least, most=plan["reps"])
    return {
        "model": name,
        "parameters": len(parameters),
        "bytes": sum(parameter.numel() * parameter.element_size() for parameter in parameters),
        "chosen_bucket_bytes": chosen,
        "rounds": len(next(iter(times.values()))),
        "seconds": {variant: reports.summary(column) for variant, column in times.items()},
    }


def rank_main() -> None:
    """Measure what the plan says; rank 0 reports the rows."""
    with harness.Ranks() as ranks:
        backends = [VARIANTS[variant][1] for variant in ranks.plan["variants"]]
        groups = {backend: ranks.group(backend) for backend in dict.fromkeys(backends) if backend}
        ranks.report = []
        for name in ranks.plan["models"]:
            ranks.show(f"{ranks.size} ranks: {name}")
            ranks.report.append(measure(ranks, groups, name))
        ranks.show("")


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
    """Draw step times as bars, one panel a model and number of ranks, each bar with its efficiency."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels = [(run, row) for run in report["runs"] for row in run["rows"]]
    figure, axes = pyplot.subplots(1, len(panels), figsize=(4.2 * len(panels), 3.8), squeeze=False)
    for axis, (run, row) in zip(axes.flat, panels, strict=True):
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
    figure.suptitle(f"Step time and efficiency, {report['machine']}, torch {report['torch']}")
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def main() -> int:
    """Measure and report; return the exit status."""
    args = parse_arguments()
    models, variants = args.models.split(","), args.variants.split(",")
    plan = {
        "models": models,
        "variants": variants,
        "reps": args.reps,
        "seconds_per_case": args.time_budget / len(models),
    }
    report: dict[str, Any] = {"machine": args.machine, "torch": torch.__version__, "runs": []}
    for ranks in map(int, args.ranks.split(",")):
        rows = harness.run_ranks(__file__, plan, ranks, mpi=False, timeout=300 + 4 * args.time_budget)
        report["runs"].append({"ranks": ranks, "variants": variants, "rows": rows})
        print_run(report["runs"][-1])
    if args.json:
        reports.write_json(report, args.json)
    if args.plot:
        plot(report, args.plot)
    return 0


if __name__ == "__main__":
    if harness.is_rank():
        rank_main()
    else:
        sys.exit(main())
