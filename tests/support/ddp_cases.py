"""Models, and training of them in one process and in several, for the tests of DistributedDataParallel."""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from ourddp import DistributedDataParallel

PER_RANK = 4


class Mlp(nn.Module):
    """Several small layers, so that buckets of a few kilobytes matter."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 3)
        )

    def forward(self, x):
        return self.layers(x)


class Cnn(nn.Module):
    """A convolution whose weights are channels-last, and batch norm with its buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 6, 3, padding=1).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm2d(6)
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        return self.head(self.norm(self.conv(x.reshape(len(x), 1, 2, 4).expand(-1, 3, 2, 4))).mean((2, 3)))


class Branches(nn.Module):
    """Uses one of two branches; `left`, `right` and `never` are asked for or not by attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(8, 8)
        self.left = nn.Linear(8, 3)
        self.right = nn.Linear(8, 3)
        self.never = nn.Linear(8, 3)
        self.use = "left"

    def forward(self, x):
        return getattr(self, self.use)(self.stem(x))


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(20, 8, sparse=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        return self.head(self.table((x.abs() * 10).long() % 20).mean(1))


class Checkpointed(nn.Module):
    """`times` runs of one checkpointed layer between two plain ones."""

    def __init__(self, reentrant: bool = False, times: int = 1) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.middle = nn.Linear(8, 8)
        self.last = nn.Linear(8, 3)
        self.reentrant = reentrant
        self.times = times

    def forward(self, x):
        x = self.first(x)
        for _ in range(self.times):
            x = checkpoint(self.middle, x, use_reentrant=self.reentrant)
        return self.last(x)


class Mixed(nn.Module):
    """Parameters of two dtypes, and a complex one."""

    def __init__(self) -> None:
        super().__init__()
        self.narrow = nn.Linear(8, 4)
        self.wide = nn.Linear(4, 4, dtype=torch.double)
        self.phase = nn.Parameter(torch.randn(4, 3, dtype=torch.cfloat))

    def forward(self, x):
        return (self.wide(self.narrow(x).double()).to(torch.cfloat) @ self.phase).abs()


class TwoTypes(nn.Module):
    """Parameters of two dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.narrow = nn.Linear(8, 4)
        self.wide = nn.Linear(4, 4, dtype=torch.double)

    def forward(self, x):
        return self.wide(self.narrow(x).double())


class Transposed(nn.Module):
    """Parameters whose elements do not lie in memory row by row."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(32, 8).t())
        self.last = nn.Parameter(torch.randn(3, 5, 32).permute(2, 0, 1))

    def forward(self, x):
        return (x @ self.first @ self.last.flatten(1)).tanh()


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": Mlp,
    "transposed": Transposed,
    "two_types": TwoTypes,
    "cnn": Cnn,
    "branches": Branches,
    "sparse": Sparse,
    "mixed": Mixed,
    "checkpoint": Checkpointed,
    "reentrant": lambda: Checkpointed(reentrant=True),
    "checkpoint_twice": lambda: Checkpointed(times=2),
    "reentrant_twice": lambda: Checkpointed(reentrant=True, times=2),
}


def make_model(name: str) -> nn.Module:
    torch.manual_seed(7)
    return MODELS[name]()


def skip_sparse_over_gloo(backend: str, model: str) -> None:
    """Skip a model whose dense and sparse gradients Gloo would reduce at once; see docs/comparison.md."""
    if backend == "gloo" and model == "sparse":
        pytest.skip("Gloo damages its process's memory when a sparse all-reduce runs beside another")


def batches(world: int, steps: int) -> Iterator[torch.Tensor]:
    """Global batches, the same in every process."""
    generator = torch.Generator().manual_seed(3)
    for _ in range(steps):
        yield torch.randn(world * PER_RANK, 8, generator=generator)


def share(batch: torch.Tensor, rank: int) -> torch.Tensor:
    return batch[rank * PER_RANK : (rank + 1) * PER_RANK]


def loss_of(output: torch.Tensor) -> torch.Tensor:
    return output.square().mean() + output.mean()


def backward(model: nn.Module, batch: torch.Tensor, rank: int) -> None:
    """Run the model forward and backward on this rank's share of a global batch."""
    loss_of(model(share(batch, rank).to(next(model.parameters()).device))).backward()


def gradients(model: nn.Module) -> dict[str, torch.Tensor | None]:
    return {
        name.removeprefix("module."): None if p.grad is None else p.grad.detach().to_dense().cpu().clone()
        for name, p in model.named_parameters()
    }


def reference_gradients(name: str, world: int, steps: int, lr: float = 0.05) -> list[dict[str, torch.Tensor | None]]:
    """Train in this process on the global batches; return each step's gradients."""
    model = make_model(name)
    optimizer = torch.optim.SGD(model.parameters(), lr)
    history = []
    for batch in batches(world, steps):
        optimizer.zero_grad()
        # One loss a share, as batch norm sees a share at a time in several processes.
        for rank in range(world):
            keep = copy.deepcopy(dict(model.named_buffers()))
            (loss_of(model(share(batch, rank))) / world).backward()
            if rank:
                for key, buffer in model.named_buffers():
                    buffer.data.copy_(keep[key])
        history.append(gradients(model))
        optimizer.step()
    return history


def assert_same(
    actual: dict[str, torch.Tensor | None],
    expected: dict[str, torch.Tensor | None],
    where: str,
    tolerance: tuple[float, float] = (1e-4, 1e-6),
) -> None:
    rtol, atol = tolerance
    for name, gradient in expected.items():
        mine = actual[name]
        assert (mine is None) == (gradient is None), f"{where}: {name} is {mine}, expected {gradient}"
        if gradient is not None:
            torch.testing.assert_close(mine, gradient, rtol=rtol, atol=atol, msg=lambda m, n=name: f"{where} {n}: {m}")


def train_and_compare(
    rank: int, world: int, name: str, options: dict, steps: int = 4, zero: bool = True, **how: Any
) -> dict:
    """Train the named model in several processes and compare each step's gradients with one process on the CPU.

    ``how`` may have a ``device``, and the ``tolerance`` of the comparison.
    """
    expected = reference_gradients(name, world, steps)
    set_up = options.pop("set_up", None)
    model = DistributedDataParallel(make_model(name).to(how.pop("device", "cpu")), **options)
    if set_up:
        set_up(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    for step, batch in enumerate(batches(world, steps)):
        optimizer.zero_grad(set_to_none=zero)
        backward(model, batch, rank)
        assert_same(gradients(model), expected[step], f"rank {rank} step {step}", **how)
        optimizer.step()
    model._check_reducer_finalized()
    return {"buckets": model.reducer._get_backward_times().parameters, "logged": model._get_ddp_logging_data()}


def check_uneven_join(rank: int, whole: bool, device: torch.device | str = "cpu") -> None:
    """Average over two ranks, of which the second has an input more."""
    model = DistributedDataParallel(nn.Linear(1, 1, bias=False).to(device))
    history = []
    with model.join(divide_by_initial_world_size=whole):
        for _ in range(2 + rank):
            model.zero_grad()
            model(torch.full((1, 1), 1.0 + rank).to(device)).sum().backward()
            history.append(model.module.weight.grad.item())
    assert history == [1.5, 1.5, 1.0 if whole else 2.0][: 2 + rank]


def averaging_hook(state, bucket):
    """A communication hook that averages, and notes in the list ``state`` what it was given."""
    state.append((bucket.index(), bucket.is_last(), bucket.buffer().numel(), len(bucket.parameters())))
    tensor = bucket.buffer() / dist.get_world_size()
    return dist.all_reduce(tensor, async_op=True).get_future().then(lambda done: done.value()[0])


def bitwise_equal_everywhere(tensor: torch.Tensor) -> bool:
    others = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(others, tensor)
    return all(torch.equal(tensor, other) for other in others)


# --- torch's class and ours, side by side ----------------------------------------------------------------------------

TorchDDP = torch.nn.parallel.DistributedDataParallel
CLASSES = (TorchDDP, DistributedDataParallel)


def known(options: dict[str, Any]) -> dict[str, Any]:
    """Skip the test if this torch's class has no such arguments."""
    for name in options:
        if name not in inspect.signature(TorchDDP).parameters:
            pytest.skip(f"this torch has no {name}")
    return options


def train(model: nn.Module, rank: int, world: int, steps: int = 3) -> dict[str, torch.Tensor | None]:
    """Return the gradients of the last of some steps."""
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    for batch in batches(world, steps):
        optimizer.zero_grad()
        backward(model, batch, rank)
        optimizer.step()
    return gradients(model)


def trained_parameters(rank: int, world: int, options: dict[str, Any]) -> list[torch.Tensor]:
    """Return the parameters after some steps of a model with a large layer."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(50, 700), nn.ReLU(), nn.Linear(700, 3)), **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        inputs = torch.randn(8, 50, generator=torch.Generator().manual_seed(10 * step + rank))
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


def outcome(function: Callable[[], Any]) -> tuple[str, str]:
    """Return the type and the text of what ``function`` raises, or of the last warning that it gives."""
    always = torch.is_warn_always_enabled()
    torch.set_warn_always(True)  # also what torch gives once in a process
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            function()
        except Exception as error:  # its type is what the test compares
            return type(error).__name__, str(error)
        finally:
            torch.set_warn_always(always)
    return (caught[-1].category.__name__, str(caught[-1].message)) if caught else ("accepted", "")
