"""Steps of models that are cut by torch's own means, over `ours`, over Gloo and over nothing.

    torchrun --nproc_per_node=4 benchmarks/sharded.py --json sharded.json

Three models, each once for each backend, in the same processes, which take turns:

- dtensor, a block of two linear layers whose weights parallelize_module() cuts by columns and by rows, so that a step
  has an all-reduce forward and one backward, as functional collectives;
- by_hand, the same block cut by hand, with ourddp.functional in their place: what DTensor itself takes is the
  difference;
- fsdp, layers whose parameters fully_shard() cuts: all-gathers forward and backward, and reduce-scatters.

`nothing` is torch's backend `fake`, which talks to nobody: its steps take the time of all that is no communication, and
their results mean nothing. A step is forward, backward and, with fsdp, the optimizer. A turn has --steps of them after
one that is not timed, and the table has the medians of --rounds turns.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import scaffold
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.testing._internal.distributed import fake_pg  # noqa: F401  # registers it

import ourddp
from ourddp import functional

BACKENDS = {"ours": "ours", "gloo": "gloo", "nothing": "fake"}


def block(width: int, hidden: int) -> nn.Sequential:
    """Return a block from (N, width) to (N, width)."""
    return nn.Sequential(nn.Linear(width, hidden, bias=False), nn.ReLU(), nn.Linear(hidden, width, bias=False))


def mesh_of(group: Any) -> DeviceMesh:
    """Return a mesh of the group's ranks.

    Meshes of the same ranks are equal unless their dimensions have different names, and DTensor, which keeps what it
    has worked out for a mesh, would use the group of the first for both.
    """
    return DeviceMesh.from_group(group, "cpu", mesh_dim_names=(group.name(),))


def dtensor_step(group: Any, args: argparse.Namespace) -> Callable[[], float]:
    """Return a step of a block that parallelize_module() has cut."""
    torch.manual_seed(0)
    mesh = mesh_of(group)
    model = parallelize_module(
        block(args.width, 4 * args.width), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()}
    )
    inputs = torch.randn(args.batch_size, args.width, requires_grad=True)

    def step() -> float:
        loss = model(inputs).square().sum()
        loss.backward()
        return float(loss.detach())

    return step


def hand_step(group: Any, args: argparse.Namespace) -> Callable[[], float]:
    """Return a step of the same block, cut by hand."""
    torch.manual_seed(0)
    first, _, second = block(args.width, 4 * args.width)
    rank, ranks = group.rank(), group.size()
    rows = first.weight.detach().chunk(ranks)[rank].clone().requires_grad_()
    columns = second.weight.detach().chunk(ranks, dim=1)[rank].clone().requires_grad_()
    inputs = torch.randn(args.batch_size, args.width, requires_grad=True)

    def step() -> float:
        hidden = torch.relu(functional.copy_to_ranks(inputs, group) @ rows.t())
        loss = functional.reduce_from_ranks(hidden @ columns.t(), group).square().sum()
        loss.backward()
        return float(loss.detach())

    return step


def fsdp_step(group: Any, args: argparse.Namespace) -> Callable[[], float]:
    """Return a step of layers whose parameters fully_shard() has cut."""
    torch.manual_seed(0)
    mesh = mesh_of(group)
    model = nn.Sequential(*(block(args.width, 4 * args.width) for _ in range(args.layers)))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    inputs = torch.randn(args.batch_size, args.width)

    def step() -> float:
        loss = model(inputs).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return step


MODELS = {"dtensor": dtensor_step, "by_hand": hand_step, "fsdp": fsdp_step}


def seconds_of(step: Callable[[], float], steps: int) -> float:
    """Return the seconds of a step, from where all ranks begin to where all have ended."""
    step()
    dist.barrier()
    begin = time.perf_counter()
    for _ in range(steps):
        step()
    dist.barrier()
    return (time.perf_counter() - begin) / steps


def measure(args: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Return the median seconds of a step by model and backend. Raises RuntimeError if the backends' losses differ."""
    groups = {name: dist.new_group(backend=backend) for name, backend in BACKENDS.items()}
    result = {}
    for model in args.models.split(","):
        steps = {name: MODELS[model](group, args) for name, group in groups.items()}
        losses = [step() for step in steps.values()]
        if abs(losses[0] - losses[1]) > 1e-3 * abs(losses[1]):
            raise RuntimeError(f"{model}: the first loss is {losses[0]} over ours and {losses[1]} over gloo")
        times: dict[str, list[float]] = {name: [] for name in BACKENDS}
        for turn in range(args.rounds):
            for name in groups if turn % 2 == 0 else reversed(groups):
                times[name].append(seconds_of(steps[name], args.steps))
        result[model] = {name: statistics.median(seconds) for name, seconds in times.items()}
    return result


def main() -> None:
    """Read the command line, measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default=",".join(MODELS), help="which ones, separated by commas")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--layers", type=int, default=8, help="of fsdp")
    parser.add_argument("--steps", type=int, default=20, help="of a turn")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the results there")
    args = parser.parse_args()
    scaffold.require_known(parser, args.models, MODELS)
    torch.set_num_threads(1)
    ourddp.init()
    seconds = measure(args)
    if dist.get_rank() == 0:
        print(f"{dist.get_world_size()} ranks    ours ms  gloo ms  nothing ms  gloo/ours  gloo/nothing")
        for model, times in seconds.items():
            milliseconds = [times[name] * 1e3 for name in BACKENDS]
            ratios = [times["gloo"] / times[name] for name in ("ours", "nothing")]
            print("{:8s} {:10.2f} {:8.2f} {:11.2f} {:9.2f}x {:12.2f}x".format(model, *milliseconds, *ratios))
        if args.json:
            scaffold.write_json({"ranks": dist.get_world_size(), "seconds": seconds}, args.json)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
