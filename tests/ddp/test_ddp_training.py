"""Whole trainings: several ranks, each with its share of every batch, follow the loss curve of one process.

One process trains on the whole batches; the ranks use DistributedSampler, DataLoader and an optimizer as programs do.
With communication hooks that lose precision, the curve may leave the other one by what the hook loses, and no more.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ddp_cases import bitwise_equal_everywhere, skip_sparse_over_gloo
from probes import QUANTISES_FOR_NCCL_ONLY
from ranks import in_ranks
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import (
    default_hooks,
    post_localSGD_hook,
    powerSGD_hook,
    quantization_hooks,
)
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.nn import functional
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from ourddp import DistributedDataParallel, SyncBatchNorm

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SAMPLES, BATCH, EPOCHS = 48, 16, 4
WORDS, LENGTH, CLASSES = 20, 6, 3
EXACT = 1e-5  # of a loss: what rounding makes of it in float32 in so many steps

# --- models ----------------------------------------------------------------------------------------------------------


class Cnn(nn.Module):
    """A convolutional network with batch norm over the whole batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 6, 3, stride=2), nn.ReLU()
        )
        self.head = nn.Linear(6, CLASSES)

    def forward(self, x):
        return self.head(self.layers(x).mean((2, 3)))


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(16, CLASSES)

    def forward(self, x):
        return self.head(self.encoder(self.words(x)).mean(1))


class Rnn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 8)
        self.lstm = nn.LSTM(8, 12, num_layers=2, batch_first=True)
        self.head = nn.Linear(12, CLASSES)

    def forward(self, x):
        return self.head(self.lstm(self.words(x))[0][:, -1])


class SparseEmbeddings(nn.Module):
    """Two tables with sparse gradients below dense layers."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.EmbeddingBag(WORDS, 8, sparse=True)
        self.first = nn.Embedding(WORDS, 4, sparse=True)
        self.head = nn.Sequential(nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, CLASSES))

    def forward(self, x):
        return self.head(torch.cat([self.words(x), self.first(x[:, 0])], 1))


def make_gpt() -> nn.Module:
    """Return the model of examples/train_gpt.py."""
    if str(EXAMPLES) not in sys.path:
        sys.path.append(str(EXAMPLES))
    return importlib.import_module("train_gpt").GPT(context=LENGTH, width=16, layers=2, heads=2)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "cnn": Cnn,
    "transformer": Transformer,
    "gpt": make_gpt,
    "rnn": Rnn,
    "sparse": SparseEmbeddings,
}


LEARNING_RATES = {"cnn": 0.2, "transformer": 3e-3, "gpt": 3e-3, "rnn": 2e-2, "sparse": 0.5}


def make_model(name: str, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(7)
    return MODELS[name]().to(dtype)


def make_optimizer(name: str, parameters: Any) -> torch.optim.Optimizer:
    if name in ("transformer", "gpt", "rnn"):
        return torch.optim.AdamW(parameters, LEARNING_RATES[name])
    # Sparse gradients and momentum do not go together.
    return torch.optim.SGD(parameters, LEARNING_RATES[name], momentum=0.0 if name == "sparse" else 0.5)


def make_data(name: str, dtype: torch.dtype) -> TensorDataset:
    generator = torch.Generator().manual_seed(11)
    if name == "cnn":
        images = torch.randn(SAMPLES, 1, 6, 6, generator=generator, dtype=torch.float64).to(dtype)
        return TensorDataset(images, (images[:, 0].mean((1, 2)) * 6).round().long().clamp(-1, 1) + 1)
    words = torch.randint(WORDS, (SAMPLES, LENGTH + 1), generator=generator)
    if name == "gpt":
        return TensorDataset(words[:, :-1], words[:, 1:])
    return TensorDataset(words[:, :-1], words[:, 0 if name == "sparse" else -2] % CLASSES)


# --- training --------------------------------------------------------------------------------------------------------


def shares(name: str, rank: int, ranks: int, dtype: torch.dtype) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Return inputs and targets of this rank's share of each batch, epoch after epoch."""
    data = make_data(name, dtype)
    sampler = DistributedSampler(data, ranks, rank, seed=3)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        yield from DataLoader(data, BATCH // ranks, sampler=sampler)


def train(
    name: str,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    rank: int,
    ranks: int,
    dtype: torch.dtype,
    after_step: Callable[[], None] = lambda: None,
) -> list[float]:
    """Train on this rank's share of each batch; return the loss of each step on that share."""
    losses = []
    for inputs, targets in shares(name, rank, ranks, dtype):
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(inputs).flatten(0, -2), targets.flatten())
        loss.backward()
        optimizer.step()
        after_step()
        losses.append(loss.item())
    return losses


@functools.cache
def one_process(name: str, dtype: torch.dtype) -> tuple[list[float], nn.Module]:
    """Train in this process alone. Return the losses and the model, which are the same each time."""
    model = make_model(name, dtype)
    losses = train(name, model, make_optimizer(name, model.parameters()), 0, 1, dtype)
    steps = SAMPLES // BATCH
    last_epoch = sum(losses[-steps:]) / steps
    assert last_epoch < 0.97 * losses[0], f"{name} learns nothing: {losses}"
    return losses, model


def averaged(losses: list[float]) -> list[float]:
    total = torch.tensor(losses, dtype=torch.float64)
    dist.all_reduce(total)
    return (total / dist.get_world_size()).tolist()


def distributed(name: str, dtype: torch.dtype, options: dict[str, Any]) -> tuple[nn.Module, DistributedDataParallel]:
    module = make_model(name, dtype)
    if name == "cnn":
        module = SyncBatchNorm.convert_sync_batchnorm(module)
    return module, DistributedDataParallel(module, **options)


def assert_ranks_agree(module: nn.Module) -> None:
    for name, value in module.state_dict().items():
        first = value.clone()
        dist.broadcast(first, 0)
        assert torch.equal(first, value), f"{name} is another one than on rank 0"


def follow_one_process(rank: int, world: int, name: str, dtype: torch.dtype, options: dict[str, Any]) -> None:
    expected, reference = one_process(name, dtype)
    module, model = distributed(name, dtype, options)
    losses = averaged(train(name, model, make_optimizer(name, model.parameters()), rank, world, dtype))
    tolerance = 1e-9 if dtype == torch.float64 else EXACT
    assert losses == pytest.approx(expected, rel=tolerance)
    assert_ranks_agree(module)
    if dtype == torch.float64:
        # In float32 Adam makes steps of rounding where a gradient is zero, as that of the bias of attention's keys is.
        for mine, theirs in zip(module.state_dict().values(), reference.state_dict().values(), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-7, atol=1e-7)


# Options must not change the result.
WAYS: dict[str, dict[str, Any]] = {
    "default": {},
    "small buckets": {"bucket_cap_mb": 0.002},
    "views": {"bucket_cap_mb": 0.002, "gradient_as_bucket_view": True},
    "static": {"static_graph": True, "bucket_cap_mb": 0.002},
    "auto": {"bucket_cap_mb": "auto"},
}


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("name", MODELS)
def test_training_equals_one_process(rank_pool, name, world):
    for options in WAYS.values():
        rank_pool(world).run(follow_one_process, name, torch.float64, options)


@pytest.mark.parametrize("name", MODELS)
def test_training_equals_one_process_in_single_precision(rank_pool, backend, name):
    skip_sparse_over_gloo(backend, name)
    rank_pool(2, backend).run(follow_one_process, name, torch.float32, {})


# --- communication hooks ---------------------------------------------------------------------------------------------

DENSE = [name for name in MODELS if name != "sparse"]


def _builtin(kind: str) -> Callable[[DistributedDataParallel], None]:
    return lambda model: model._register_builtin_comm_hook(getattr(dist.BuiltinCommHookType, kind))


def _python(hook: Callable, state: Callable[[], Any] = lambda: None) -> Callable[[DistributedDataParallel], None]:
    return lambda model: model.register_comm_hook(state(), hook)


def _power_sgd(rank: int, **options: Any) -> Callable[[], powerSGD_hook.PowerSGDState]:
    # From the third step on; even a matrix of 3 by 12 is worth it.
    return lambda: powerSGD_hook.PowerSGDState(
        None, matrix_approximation_rank=rank, start_powerSGD_iter=2, min_compression_rate=0.5, **options
    )


def _local_sgd(model: DistributedDataParallel) -> None:
    """After two steps only all-reduce in the subgroup, which is all ranks: nothing may change."""
    state = post_localSGD_hook.PostLocalSGDState(None, dist.group.WORLD, start_localSGD_iter=2)
    model.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)


# Each with how far a loss may be from that of one process, as part of the loss. torch's batched PowerSGD is missing: it
# passes a matrix to a function that takes only stacks of matrices.
HOOKS: dict[str, tuple[Callable[[DistributedDataParallel], None], float]] = {
    "built-in all-reduce": (_builtin("ALLREDUCE"), EXACT),
    "all-reduce": (_python(default_hooks.allreduce_hook), EXACT),
    "post-local SGD in one group": (_local_sgd, EXACT),
    "built-in fp16": (_builtin("FP16_COMPRESS"), 1e-4),
    "fp16": (_python(default_hooks.fp16_compress_hook), 1e-4),
    "fp16 around all-reduce": (_python(default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook)), 1e-4),
    "bf16": (_python(default_hooks.bf16_compress_hook), 2e-3),
    "bf16 around all-reduce": (_python(default_hooks.bf16_compress_wrapper(default_hooks.allreduce_hook)), 2e-3),
    "quantised": (_python(quantization_hooks.quantization_pertensor_hook), 5e-2),
    "quantised per channel": (_python(quantization_hooks.quantization_perchannel_hook), 3e-2),
    "PowerSGD of rank 1": (_python(powerSGD_hook.powerSGD_hook, _power_sgd(1)), 0.1),
    "PowerSGD of rank 4": (_python(powerSGD_hook.powerSGD_hook, _power_sgd(4)), 2e-2),
}


def skip_if_not_for_cpu(hook: str) -> None:
    if hook.startswith("quantised") and QUANTISES_FOR_NCCL_ONLY:
        pytest.skip("this torch's quantising hooks work with NCCL only")


def follow_with_hook(rank: int, world: int, name: str, hook: str) -> None:
    register, tolerance = HOOKS[hook]
    expected, _ = one_process(name, torch.float32)
    # One bucket: some hooks start collectives from callbacks, whose order only one bucket makes certain.
    curves = []
    for with_hook in (False, True):
        module, model = distributed(name, torch.float32, {})
        if with_hook:
            register(model)
        losses = train(name, model, make_optimizer(name, model.parameters()), rank, world, torch.float32)
        curves.append(averaged(losses))
        assert_ranks_agree(module)
    plain, losses = curves
    assert losses == pytest.approx(expected, rel=tolerance), hook
    if tolerance > EXACT:
        assert losses != plain, f"{hook} has lost nothing, so it was not run"


@pytest.mark.parametrize("name", DENSE)
@pytest.mark.parametrize("hook", HOOKS)
def test_training_with_a_hook_follows_one_process(rank_pool, hook, name):
    skip_if_not_for_cpu(hook)
    rank_pool(2).run(follow_with_hook, name, hook)


@pytest.mark.parametrize("hook", ["built-in fp16", "bf16", "quantised", "PowerSGD of rank 4"])
def test_hooks_with_four_ranks(rank_pool, hook):
    skip_if_not_for_cpu(hook)
    rank_pool(4).run(follow_with_hook, "gpt", hook)


@pytest.mark.parametrize(
    "hook", ["built-in all-reduce", "built-in fp16", "quantised per channel", "PowerSGD of rank 1"]
)
def test_hooks_over_gloo(rank_pool, hook):
    skip_if_not_for_cpu(hook)
    rank_pool(2, "gloo").run(follow_with_hook, "transformer", hook)


@in_ranks(2)
def test_a_hook_reduces_sparse_gradients(rank, world):
    expected, _ = one_process("sparse", torch.float32)
    _, model = distributed("sparse", torch.float32, {})
    model.register_comm_hook(None, default_hooks.allreduce_hook)
    optimizer = make_optimizer("sparse", model.parameters())
    assert averaged(train("sparse", model, optimizer, rank, world, torch.float32)) == pytest.approx(expected, rel=EXACT)


@in_ranks(2)
def test_averaging_after_local_steps_equals_one_process(rank, world):
    name = "cnn"
    expected, reference = one_process(name, torch.float64)
    alone = dist.new_subgroups(1)[0]
    module, model = distributed(name, torch.float64, {})
    state = post_localSGD_hook.PostLocalSGDState(None, alone, start_localSGD_iter=2)
    model.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)
    averager = PeriodicModelAverager(period=1, warmup_steps=2)
    plain = make_optimizer(name, model.parameters())
    optimizer = PostLocalSGDOptimizer(optim=plain, averager=averager)
    losses = averaged(train(name, model, optimizer, rank, world, torch.float64))
    # SGD is linear in the gradients, so the average of the steps is the step of the average.
    assert losses == pytest.approx(expected, rel=1e-9)
    for mine, theirs in zip(module.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs)
    # The ranks' momenta differ, as each has made its own steps.
    momentum = plain.state[next(iter(model.parameters()))]["momentum_buffer"]
    assert not bitwise_equal_everywhere(momentum)
