"""Steps of a model that is cut by layer: their time, and the activations that each rank holds at its peak.

    torchrun --nproc_per_node=2 benchmarks/pipeline.py --schedules gpipe,1f1b --micro-batches 2,4,8

The model is --layers times a linear layer and a ReLU, all of the same width, so stages are equal. The first lines are
one process with one thread, which runs the whole batch at once, or one micro-batch after the other: smaller matrices
take longer for each sample. docs/parallel/model-parallel.md explains the figures.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

import ourddp


class Activations:
    """Counts the bytes that forward keeps for backward, and the most of them at a time."""

    def __init__(self, weights: set[int]) -> None:
        """Leave out tensors at the addresses `weights`."""
        self._weights = weights
        self._holders: dict[int, int] = {}  # how many hold the storage at an address
        self._now = 0
        self.peak = 0

    def keep(self, tensor: Tensor) -> Any:
        """Count a tensor until backward drops it."""
        storage = tensor.untyped_storage()
        if storage.data_ptr() in self._weights:
            return tensor
        holders = self._holders.get(storage.data_ptr(), 0)
        self._holders[storage.data_ptr()] = holders + 1
        self._now += 0 if holders else storage.nbytes()
        self.peak = max(self.peak, self._now)
        return _Held(tensor, self)

    def drop(self, tensor: Tensor) -> None:
        """Stop counting it."""
        storage = tensor.untyped_storage()
        self._holders[storage.data_ptr()] -= 1
        self._now -= 0 if self._holders[storage.data_ptr()] else storage.nbytes()


class _Held:
    def __init__(self, tensor: Tensor, activations: Activations) -> None:
        self.tensor, self._activations = tensor, activations

    def __del__(self) -> None:
        self._activations.drop(self.tensor)


def make_layers(layers: int, width: int) -> nn.Sequential:
    """Return a network from (N, width) to (N, width)."""
    return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(layers)))


def seconds_of(step: Callable[[], Any], repeats: int) -> float:
    """Return the least time of a step after two that do not count; whatever else the machine does only adds to it."""
    times = []
    for _ in range(repeats + 2):
        begin = time.perf_counter()
        step()
        times.append(time.perf_counter() - begin)
    return min(times[2:])


def peak_of(step: Callable[[], Any], model: nn.Module) -> int:
    """Return the most bytes of activations that a step holds at a time."""
    activations = Activations({parameter.untyped_storage().data_ptr() for parameter in model.parameters()})
    with torch.autograd.graph.saved_tensors_hooks(
        activations.keep, lambda held: held.tensor if isinstance(held, _Held) else held
    ):
        step()
    return activations.peak


def alone(model: nn.Module, inputs: Tensor, micro_batches: int) -> None:
    """Run forward and backward of a batch, one micro-batch after the other."""
    for part in inputs.chunk(micro_batches):
        (functional.mse_loss(model(part), part) / micro_batches).backward()


def line(name: str, micro_batches: int, seconds: float, first: float, peaks: list[int]) -> str:
    """Return a row of the table."""
    mebibytes = "  ".join(f"{peak / 2**20:5.2f}" for peak in peaks)
    return f"{name:12s} {micro_batches:13d} {seconds * 1e3:8.1f} {first / seconds:9.2f}   {mebibytes}"


def measure(args: argparse.Namespace) -> None:
    """Print the table."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    inputs = torch.randn(args.batch_size, args.width)
    first = 0.0
    if rank == 0:
        print("schedule     micro-batches  ms/step  speed-up   activations of each rank at its peak, MiB")
        model = make_layers(args.layers, args.width)
        for count in (1, *args.micro_batches):
            seconds = seconds_of(lambda count=count: alone(model, inputs, count), args.repeats)
            first = first or seconds
            peak = peak_of(lambda count=count: alone(model, inputs, count), model)
            print(line("one process", count, seconds, first, [peak]), flush=True)
    dist.barrier()
    for schedule in args.schedules:
        for count in args.micro_batches:
            model = ourddp.ModelParallel(
                make_layers(args.layers, args.width),
                inputs,
                functional.mse_loss,
                schedule=schedule,
                micro_batches=count,
                balance=args.balance or "time",
            )
            seconds = seconds_of(lambda model=model: model.step(inputs, inputs), args.repeats)
            peaks: list[Any] = [None] * ranks
            dist.all_gather_object(peaks, peak_of(lambda model=model: model.step(inputs, inputs), model))
            if rank == 0:
                print(line(schedule, count, seconds, first, peaks), flush=True)


def main() -> None:
    """Read the command line and measure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--schedules", type=lambda text: text.split(","), default=["gpipe", "1f1b"])
    parser.add_argument("--micro-batches", type=lambda text: [*map(int, text.split(","))], default=[2, 4, 8])
    parser.add_argument("--balance", type=lambda text: [*map(int, text.split(","))], help="layers of each stage")
    parser.add_argument("--batch-size", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=30)
    args = parser.parse_args()
    torch.set_num_threads(1)
    ourddp.init()
    measure(args)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
