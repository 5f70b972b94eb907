"""Trains one network on the same handwritten digits in every way that this package knows, and compares them.

    torchrun --nproc_per_node=4 examples/compare.py --plot compare.png

For each way: the time of a step, the bytes that a rank keeps from step to step, those of the tensors that it gives to
collectives and sends in a step, and the loss. Only rank 0 works in the ways of one process, the last rank is the server
of a parameter server, and asynchronous workers see as many updates in a step as there are workers.
docs/parallel/README.md says what each way is good for.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import central_storage
import common
import local_sgd
import parameter_server
import sharded
import torch
import torch.distributed as dist
import ways
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional
from torch.nn.utils import parameters_to_vector
from torch.profiler import profile

import ourddp

COUNTED = 8  # the last steps, whose communication is counted; local SGD averages once in so many
ELEMENT = {"Double": 8, "Long": 8, "Float": 4, "Int": 4, "Half": 2, "BFloat16": 2, "Byte": 1, "Char": 1, "Bool": 1}


@dataclass
class Way:
    """A way of training, as one rank takes part in it."""

    step: ways.Step
    kept: Callable[[], list[torch.Tensor]]  # what this rank has in memory from step to step
    part: int = 0  # which part of a batch this rank trains with,
    parts: int = 1  # and how many parts there are


@dataclass
class Result:
    """What one rank has measured; a rank that does not train has no losses."""

    losses: list[float] = field(default_factory=list)  # of this rank's part of each batch
    seconds: list[float] = field(default_factory=list)  # of each step
    kept: int = 0  # bytes in memory from step to step
    sent: int = 0  # bytes of tensors given to collectives and messages in a step


def tensors_of(model: nn.Module) -> list[torch.Tensor]:
    """Return a model's parameters, and the gradients that there are."""
    parameters = list(model.parameters())
    return parameters + [parameter.grad for parameter in parameters if parameter.grad is not None]


def one_process(args: argparse.Namespace, rank: int, ranks: int) -> Way | None:
    """Return the way of plain training at rank 0, with which the others are compared."""
    if rank != 0:
        return None
    model = ways.model(args.seed)
    return Way(ways.plain_step(model, sgd(args, model)), lambda: tensors_of(model))


def replicas(args: argparse.Namespace, rank: int, ranks: int) -> Way | None:
    """Return the way of ourddp.DataParallel: replicas in threads of rank 0."""
    if rank != 0:
        return None
    model = ourddp.DataParallel(ways.model(args.seed), ["cpu"] * ranks)
    # The first device also keeps the parameters that it sent last.
    return Way(ways.plain_step(model, sgd(args, model)), lambda: tensors_of(model) * ranks + list(model.parameters()))


def data_parallel(args: argparse.Namespace, rank: int, ranks: int) -> Way:
    """Return the way of ourddp.DistributedDataParallel."""
    model = ourddp.DistributedDataParallel(ways.model(args.seed))
    return Way(ways.plain_step(model, sgd(args, model)), lambda: tensors_of(model), rank, ranks)


def fully_sharded(args: argparse.Namespace, rank: int, ranks: int) -> Way:
    """Return the way of torch's fully_shard(), which cuts parameters, gradients and optimizer over the ranks."""
    model = ways.model(args.seed)
    mesh = init_device_mesh("cpu", (ranks,))
    for layer in model:
        if any(True for _ in layer.parameters()):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return Way(ways.plain_step(model, sgd(args, model)), lambda: tensors_of(model), rank, ranks)


def cut_by_layer(args: argparse.Namespace, rank: int, ranks: int) -> Way:
    """Return the way of ourddp.ModelParallel: each rank has some of the layers."""
    network = ways.model(args.seed)
    example = torch.zeros(args.batch_size, 1, 8, 8)
    parts = math.gcd(args.batch_size, 4)
    model = ourddp.ModelParallel(network, example, functional.cross_entropy, micro_batches=parts)
    optimizer = sgd(args, model)

    def step(images: torch.Tensor, labels: torch.Tensor) -> float:
        optimizer.zero_grad()
        loss = model.step(images, labels)
        optimizer.step()
        return loss

    return Way(step, lambda: tensors_of(model))


def cut_by_slice(args: argparse.Namespace, rank: int, ranks: int) -> Way:
    """Return the way of torch's tensor parallelism: each rank has a slice of both linear layers."""
    model = ways.model(args.seed)
    mesh = init_device_mesh("cpu", (ranks,))
    first, second = (name for name, layer in model.named_children() if isinstance(layer, nn.Linear))
    parallelize_module(model, mesh, {first: ColwiseParallel(), second: RowwiseParallel()})
    return Way(ways.plain_step(model, sgd(args, model)), lambda: tensors_of(model))


def central(args: argparse.Namespace, rank: int, ranks: int) -> Way:
    """Return the way in which rank 0 keeps the parameters."""
    model = ways.model(args.seed)
    return Way(central_storage.make_step(args, rank, ranks, model), lambda: tensors_of(model), rank, ranks)


def local(way: str) -> Callable[[argparse.Namespace, int, int], Way]:
    """Return a way in which the ranks train alone, and average now and then."""

    def make(args: argparse.Namespace, rank: int, ranks: int) -> Way:
        model = ways.model(args.seed)
        its = argparse.Namespace(**vars(args), way=way, period=COUNTED)
        return Way(local_sgd.make_step(its, rank, ranks, model), lambda: tensors_of(model), rank, ranks)

    return make


def servers(mode: str) -> Callable[[argparse.Namespace, int, int], Way]:
    """Return a way with one server, which is the last rank, and workers."""

    def make(args: argparse.Namespace, rank: int, ranks: int) -> Way:
        model = ways.model(args.seed)
        if rank < ranks - 1:
            worker = parameter_server.Worker(model, [ranks - 1])
            return Way(worker.step, lambda: tensors_of(model), rank, ranks - 1)
        start = parameters_to_vector(model.parameters()).detach()
        server = parameter_server.Server(start, ranks - 1, args.lr, mode, staleness=2)
        return Way(lambda *_: server.serve(1), lambda: server.kept)

    return make


WAYS: dict[str, Callable[[argparse.Namespace, int, int], Way | None]] = {
    "one process": one_process,
    "DataParallel": replicas,
    "DistributedDataParallel": data_parallel,
    "fully sharded": fully_sharded,
    "cut by layer": cut_by_layer,
    "cut by slice": cut_by_slice,
    "parameter server, sync": servers("sync"),
    "parameter server, async": servers("async"),
    "central storage": central,
    "local SGD, periodic": local("periodic"),
    "local SGD, gossip": local("gossip"),
}


def sgd(args: argparse.Namespace, model: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer of all ways."""
    return torch.optim.SGD(model.parameters(), lr=args.lr)


def measure(args: argparse.Namespace, way: Way) -> Result:
    """Train for --steps steps, and count the bytes of the last one."""
    result = Result()

    def step(batch: ways.Batch) -> None:
        began = time.perf_counter()
        loss = way.step(*ways.share(batch, way.part, way.parts))
        result.seconds.append(time.perf_counter() - began)
        if loss is not None:
            result.losses.append(loss)

    batches = list(ways.batches(args))
    for batch in batches[:-COUNTED]:
        step(batch)
    timed = len(result.seconds)
    with profile() as trace:
        for batch in batches[-COUNTED:]:
            step(batch)
    del result.seconds[timed:]  # the profiler takes time, too
    result.sent = communicated(trace) // COUNTED
    result.kept = sharded.bytes_here(way.kept())
    return result


def communicated(trace: profile) -> int:
    """Return the bytes that collectives and messages were given, as torch's profiler has recorded them."""
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        trace.export_chrome_trace(file.name)
        events = json.loads(Path(file.name).read_text())["traceEvents"]
    calls = [event["args"] for event in events if event["name"] == "record_param_comms"]
    sent = [call for call in calls if not call["Collective name"].startswith("recv")]
    return sum(call["In msg nelems"] * ELEMENT.get(call["dtype"], 0) for call in sent)


def compare(args: argparse.Namespace, rank: int, ranks: int) -> dict[str, list[Result]]:
    """Train in every way, one after the other; return what all ranks have measured, by way."""
    results = {}
    for name, make in WAYS.items():
        way = make(args, rank, ranks)
        mine = Result() if way is None else measure(args, way)
        everybody: list[Result] = [Result()] * ranks
        dist.all_gather_object(everybody, mine)
        results[name] = everybody
        if rank == 0:
            print(".", end="", flush=True)
    return results


def losses_of(results: list[Result]) -> list[float]:
    """Return the mean loss of each step over the ranks that train."""
    return [statistics.fmean(step) for step in zip(*(each.losses for each in results if each.losses), strict=True)]


def table(results: dict[str, list[Result]]) -> str:
    """Return the results as a table of Markdown."""
    lines = ["| Way | a step | kept by a rank, at most | communicated by a rank, at most | last loss |"]
    lines.append("| --- | --- | --- | --- | --- |")
    for name, ranks in results.items():
        step = statistics.median(seconds for each in ranks if each.losses for seconds in each.seconds)
        kept, sent = (max(getattr(each, what) for each in ranks) / 1024 for what in ("kept", "sent"))
        loss = statistics.fmean(losses_of(ranks)[-10:])
        lines.append(f"| {name} | {step * 1e3:.2f} ms | {kept:,.0f} KiB | {sent:,.0f} KiB | {loss:.4f} |")
    return "\n".join(lines)


def plot(results: dict[str, list[Result]], path: Path) -> None:
    """Draw the losses, smoothed over ten steps."""
    import matplotlib
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    axes.set_prop_cycle(color=matplotlib.colormaps["tab20"].colors)
    for name, ranks in results.items():
        losses = losses_of(ranks)
        axes.plot([statistics.fmean(losses[max(0, k - 9) : k + 1]) for k in range(len(losses))], label=name)
    axes.set(xlabel="step", ylabel="loss (mean of ten steps)", yscale="log")
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=120)


def main() -> None:
    """Read the command line, and compare."""
    parser = ways.argument_parser(__doc__.splitlines()[0])
    parser.add_argument("--plot", type=Path, metavar="PATH", help="draw the losses into this file")
    parser.add_argument(
        "--metrics", type=Path, metavar="PATH", help="write the losses of all ways into this file, as JSON"
    )
    args = parser.parse_args()
    with common.process_group(args.backend, args.plot, args.metrics) as (rank, ranks):
        if ranks < 2:
            raise common.Refused("one rank has nothing to compare: start more with torchrun --nproc_per_node=4")
        if args.steps <= COUNTED:
            raise common.Refused(f"--steps must be more than {COUNTED}")
        for trainers in (ranks, ranks - 1):
            ways.check_batch(args, trainers)
        results = compare(args, rank, ranks)
        if rank == 0:
            print(f"\n{table(results)}", flush=True)
            if args.metrics:
                args.metrics.write_text(json.dumps({name: losses_of(ranks) for name, ranks in results.items()}))
            if args.plot:
                plot(results, args.plot)


if __name__ == "__main__":
    main()
