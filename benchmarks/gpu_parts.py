"""What a rank of benchmarks/gpu.py measures: copies, all-reduce, training steps."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ourddp.bench import harness
from ourddp.bench import report as reports

Action = Callable[[], object]

COPIED_BYTES = 512 << 20
CALLS = 20  # that are timed together, so that the host is ahead of the device
HELD_CYCLES = 20_000_000  # the device waits about ten milliseconds, while the host tells it what to do
SEQUENCES, TOKENS, WORDS = 8, 128, 8192
CHECKED_STEPS = 3
MOST_APART = 0.02  # bfloat16, and attention that adds up in any order


class Accelerator:
    """The device under test; also the CPU, on which the programs can be tried out."""

    def __init__(self, kind: str, rank: int) -> None:
        self.on_gpu = kind == "cuda"
        if self.on_gpu:
            index = rank % torch.cuda.device_count()
            torch.cuda.set_device(index)
            self.device = torch.device("cuda", index)
        else:
            self.device = torch.device(kind)

    def finish(self) -> None:
        """Wait until the device has done all its work."""
        if self.on_gpu:
            torch.cuda.synchronize()

    def finished(self, action: Action) -> Action:
        """Return the action followed by that wait."""

        def act() -> None:
            action()
            self.finish()

        return act

    def seconds(self, action: Action) -> float:
        """Return what the device takes for the action, which is called several times."""
        if not self.on_gpu:
            start = time.perf_counter()
            for _ in range(CALLS):
                action()
            return (time.perf_counter() - start) / CALLS
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(HELD_CYCLES)
        begin.record()
        for _ in range(CALLS):
            action()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3 / CALLS


def measure_copies(accelerator: Accelerator, size: int) -> float:
    """Return the bytes per second, read and written, of torch's copy_."""
    source, target = (torch.ones(size // 4, device=accelerator.device) for _ in range(2))
    times = [accelerator.seconds(partial(target.copy_, source)) for _ in range(11)]
    return 2 * size / statistics.median(times[1:])  # the first one warms up


def alone(ranks: harness.Ranks, action: Callable[[], Any]) -> Any:
    """Return what `action` returns on rank 0, while the others let it have the device for itself; None there."""
    dist.barrier()
    result = action() if ranks.rank == 0 else None
    dist.barrier()
    return result


# --- all-reduce ------------------------------------------------------------------------------------------------------


def why_no_nccl(ranks: harness.Ranks, accelerator: Accelerator) -> str:
    """Return what NCCL says if it cannot add up here, otherwise nothing."""
    try:
        tensor = torch.ones(1, device=accelerator.device)
        dist.all_reduce(tensor, group=ranks.group("nccl"))
        return "" if int(tensor) == ranks.size else f"it adds up {ranks.size} ones to {int(tensor)}"
    except (RuntimeError, ValueError) as error:
        return str(error).strip().splitlines()[-1]


def all_reduces(
    ranks: harness.Ranks, accelerator: Accelerator, groups: dict[str, dist.ProcessGroup], size: int
) -> dict[str, Action]:
    """Return each variant's all-reduce of float32, which has been seen to add up."""
    tensors = {name: torch.empty(size // 4, device=accelerator.device) for name in groups}
    actions = {
        name: accelerator.finished(partial(dist.all_reduce, tensor, group=groups[name]))
        for name, tensor in tensors.items()
    }
    for name, action in actions.items():
        tensors[name].fill_(ranks.rank + 1)
        action()
        if not bool(tensors[name].eq(ranks.size * (ranks.size + 1) / 2).all()):
            raise RuntimeError(f"{name}: the sum of {size} bytes is wrong")
        tensors[name].zero_()
    accelerator.finish()
    return actions


def measure_all_reduce(
    ranks: harness.Ranks, accelerator: Accelerator, groups: dict[str, dist.ProcessGroup], size: int, budget: float
) -> dict[str, Any]:
    """Return the row of one size."""
    actions = all_reduces(ranks, accelerator, groups, size)
    times = ranks.measure(actions, budget=budget, least=5, most=200)
    return {"size": size, "seconds": {name: reports.summary(column) for name, column in times.items()}}


# --- training --------------------------------------------------------------------------------------------------------


class Transformer(nn.Module):
    """A small language model: more than 100 million parameters with eight layers of width 1024."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, width)
        layer = nn.TransformerEncoderLayer(
            width, width // 64, 4 * width, dropout=0.0, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, WORDS)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        """Return the loss of predicting each word's next one."""
        logits = self.head(self.layers(self.words(words)))
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), words[:, 1:].flatten())


def words_of(rank: int, step: int, accelerator: Accelerator) -> torch.Tensor:
    """Return what a rank sees in a step, the same in every process."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randint(WORDS, (SEQUENCES, TOKENS), generator=generator).to(accelerator.device)


class Training:
    """A model, and its steps under bfloat16 autocast."""

    def __init__(self, plan: dict[str, Any], accelerator: Accelerator, wrap: Callable[[nn.Module], nn.Module]) -> None:
        torch.manual_seed(0)
        self.accelerator = accelerator
        self.plain = Transformer(plan["layers"], plan["width"]).to(accelerator.device)
        self.model = wrap(self.plain)
        self.optimizer = torch.optim.SGD(self.plain.parameters(), lr=0.05)

    def step(self, shares: list[torch.Tensor]) -> None:
        """Train on the shares, one after another, and on their average."""
        self.optimizer.zero_grad()
        for share in shares:
            # A try on the CPU does without: processors that lack bfloat16 take ten times as long for it.
            kind = self.accelerator.device.type
            with torch.autocast(kind, torch.bfloat16, enabled=kind != "cpu"):
                loss = self.model(share)
            (loss / len(shares)).backward()
        self.optimizer.step()

    def state(self) -> torch.Tensor:
        """Return all parameters."""
        return torch.cat([parameter.detach().flatten() for parameter in self.plain.parameters()])


def wrapper(ranks: harness.Ranks, variant: str) -> Callable[[nn.Module], nn.Module]:
    """Return what makes a model train as the variant, "whose+backend", "whose+backend+bucket size" or "local", does."""
    if variant == "local":
        return lambda model: model
    whose, backend, *size = variant.split("+")
    import ourddp

    cls = nn.parallel.DistributedDataParallel if whose == "torch" else ourddp.DistributedDataParallel
    return partial(cls, process_group=ranks.group(backend), bucket_cap_mb=size[0] if size else None)


def differences(
    ranks: harness.Ranks, accelerator: Accelerator, trainings: dict[str, Training], reference: Training
) -> dict[str, float]:
    """Train some steps; return how far each variant is from one process that sees every rank's share.

    That is the distance between the two, relative to the way that the one process has gone. Raises RuntimeError where a
    variant's parameters differ between ranks.
    """
    start = reference.state().clone()
    for step in range(CHECKED_STEPS):
        shares = [words_of(rank, step, accelerator) for rank in range(ranks.size)]
        reference.step(shares)
        for training in trainings.values():
            training.step([shares[ranks.rank]])
    way = (reference.state() - start).norm()
    apart = {}
    for name, training in trainings.items():
        state = training.state().cpu()
        other = state.clone()
        dist.broadcast(other, src=0)
        if not torch.equal(state, other):
            raise RuntimeError(f"{name}: the parameters of rank {ranks.rank} are not those of rank 0")
        apart[name] = float((training.state() - reference.state()).norm() / way)
    return apart


def measure_training(
    ranks: harness.Ranks, accelerator: Accelerator, variants: list[str], budget: float
) -> dict[str, Any]:
    """Return the row of the training steps."""
    make = partial(Training, ranks.plan, accelerator)
    exchanging = {name: make(wrapper(ranks, name)) for name in variants}
    apart = differences(ranks, accelerator, exchanging, make(wrapper(ranks, "local")))
    trainings = {"local": make(wrapper(ranks, "local")), **exchanging}
    share = words_of(ranks.rank, CHECKED_STEPS, accelerator)
    actions = {name: accelerator.finished(partial(one.step, [share])) for name, one in trainings.items()}
    times = ranks.measure(actions, budget=budget, least=3, most=50)
    return {
        "parameters": sum(parameter.numel() for parameter in trainings["local"].plain.parameters()),
        "apart": apart,
        "seconds": {name: reports.summary(column) for name, column in times.items()},
    }
