"""torch's communication hooks with many buckets, on ranks that are slow at different moments."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from probes import QUANTISES_FOR_NCCL_ONLY
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import (
    ddp_zero_hook,
    default_hooks,
    post_localSGD_hook,
    powerSGD_hook,
    quantization_hooks,
)
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from ourddp import DistributedDataParallel

WIDTH, LAYERS, STEPS = 24, 6, 6


class Late(torch.autograd.Function):
    """Lets backward rest, so that what is attached to futures comes earlier or later."""

    noise: random.Random | None = None

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        if Late.noise is not None and Late.noise.random() < 0.6:
            time.sleep(Late.noise.random() * 0.005)
        return gradient


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = Late.apply(layer(x).tanh())
        return x


def register(model: Any, hook: str) -> Any:
    """Register that hook of torch's. Returns the optimizer where the hook has one."""
    if hook.startswith("zero"):
        make = (
            ddp_zero_hook.hook_with_zero_step_interleaved
            if "interleaved" in hook
            else ddp_zero_hook.hook_with_zero_step
        )
        zero = ZeroRedundancyOptimizer(
            model.parameters(), optimizer_class=torch.optim.SGD, overlap_with_ddp=True, lr=0.05
        )
        inner = default_hooks.allreduce_hook if "two stages" not in hook else two_stages
        model.register_comm_hook(None, make(inner, model, zero, shard_buckets="shards" in hook))
        return zero
    if "powerSGD" in hook:
        state = powerSGD_hook.PowerSGDState(None, 2, start_powerSGD_iter=2, min_compression_rate=0.5)
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    elif hook == "post_localSGD":
        local = post_localSGD_hook.PostLocalSGDState(None, dist.group.WORLD, start_localSGD_iter=2)
        model.register_comm_hook(local, post_localSGD_hook.post_localSGD_hook)
    elif hook.startswith("quantization"):
        model.register_comm_hook(dist.group.WORLD, getattr(quantization_hooks, hook))
    elif hook == "two stages":
        model.register_comm_hook(None, two_stages)
    else:
        model.register_comm_hook(None, getattr(default_hooks, hook))
    return None


def two_stages(_, bucket):  # annotations would be strings here, which torch refuses
    """Sum, and then give everybody a part and gather the parts again."""
    world = dist.get_world_size()

    def again(future: Any) -> torch.Tensor:
        average = future.value()[0] / world
        parts = [torch.empty_like(average) for _ in range(world)]
        dist.all_gather(parts, average)
        dist.all_reduce(average, op=dist.ReduceOp.MAX, async_op=True).get_future().wait()
        return torch.stack(parts).amin(0).maximum(average)

    return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(again)


def train(rank: int, world: int, hook: str, torchs: bool, late: int | None, bucket_cap_mb: float) -> list[torch.Tensor]:
    """Return the parameters after some steps. ``late``: the seed of how late this rank is; None: not at all."""
    Late.noise = None if late is None else random.Random(late * 16 + rank)
    model = (TorchDDP if torchs else DistributedDataParallel)(Net(), bucket_cap_mb=bucket_cap_mb)
    optimizer = register(model, hook) or torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(STEPS):
        optimizer.zero_grad()
        data = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step * 16 + rank))
        if Late.noise is not None:
            time.sleep(Late.noise.random() * 0.005)
        model(data).square().sum().backward()
        optimizer.step()
    Late.noise = None
    return [parameter.detach().clone() for parameter in model.parameters()]


def compare(rank: int, world: int, hook: str, torchs: bool, elementwise: bool) -> None:
    small = 0.002  # a bucket for nearly every parameter
    results = [train(rank, world, hook, torchs, None, small)]
    results += [train(rank, world, hook, torchs, seed, small) for seed in range(2)]
    if elementwise:
        results.append(train(rank, world, hook, torchs, None, 25))
    for result in results[1:]:
        for one, other in zip(results[0], result, strict=True):
            assert torch.equal(one, other)
    start = Net()
    assert not any(torch.equal(one, other) for one, other in zip(results[0], start.parameters(), strict=True))


HOOKS = {
    "allreduce_hook": True,
    "fp16_compress_hook": True,
    "bf16_compress_hook": True,
    "two stages": True,
    "post_localSGD": True,
    "powerSGD": False,
    "quantization_pertensor_hook": False,
    "quantization_perchannel_hook": False,
    "zero": False,
    "zero, shards": False,
    "zero, interleaved": False,
    "zero, interleaved, shards": False,
    "zero, interleaved, two stages": False,
}


def skip_if_not_for_cpu(hook: str) -> None:
    if hook.startswith("quantization") and QUANTISES_FOR_NCCL_ONLY:
        pytest.skip("this torch's quantising hooks work with NCCL only")


@pytest.mark.parametrize("torchs", [False, True], ids=["ourddp", "torch"])
@pytest.mark.parametrize("hook", HOOKS)
def test_hooks_do_not_depend_on_who_is_late(rank_pool, hook, torchs):
    skip_if_not_for_cpu(hook)
    rank_pool(3 if "zero" in hook else 2).run(compare, hook, torchs, HOOKS[hook])


@pytest.mark.parametrize("hook", ["two stages", "powerSGD", "quantization_pertensor_hook", "zero, interleaved"])
def test_hooks_over_tcp(rank_pool, hook):
    skip_if_not_for_cpu(hook)
    rank_pool(3, nodes=3).run(compare, hook, False, HOOKS[hook])
