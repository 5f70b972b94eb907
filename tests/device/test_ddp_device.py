"""DistributedDataParallel with parameters on a device: on the stand-in, and on GPUs where there are some."""

from __future__ import annotations

import threading
from typing import Any

import device_type
import pytest
import torch
import torch.distributed as dist
from ddp_cases import (
    assert_same,
    backward,
    batches,
    check_uneven_join,
    gradients,
    make_model,
    train_and_compare,
)
from device_cases import here, stop_stream, stopped
from ranks import in_ranks
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from ourddp import DistributedDataParallel

VIEWS = pytest.mark.parametrize("views", [False, True], ids=["copies", "views"])

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("mlp", {}),
    "small buckets": ("mlp", {"bucket_cap_mb": 0.001}),
    "strides": ("transposed", {}),
    "unused": ("branches", {"find_unused_parameters": True}),
    "static": ("branches", {"static_graph": True}),
    "types": ("two_types", {}),
}


@pytest.mark.parametrize("zero", [True, False], ids=["new gradients", "kept gradients"])
@VIEWS
@pytest.mark.parametrize("case", CASES)
@in_ranks(2, "backend")
def test_gradients_are_those_of_one_process(
    rank: int, world: int, kind: str, case: str, views: bool, zero: bool
) -> None:
    name, options = CASES[case]
    options = {**options, "gradient_as_bucket_view": views}
    train_and_compare(rank, world, name, options, zero=zero, device=here(kind))


@VIEWS
@pytest.mark.parametrize("hook", [False, True], ids=["no hook", "hook"])
@in_ranks(2, "backend")
def test_weighted_gradients_are_those_of_one_process(rank: int, world: int, kind: str, views: bool, hook: bool) -> None:
    alone = make_model("two_types")
    device = here(kind)
    model = DistributedDataParallel(make_model("two_types").to(device), gradient_as_bucket_view=views)
    if hook:
        model.register_comm_hook(None, default_hooks.allreduce_hook)
    for batch in batches(world, 3):
        alone.zero_grad()
        model.zero_grad()
        (alone(batch).square().sum() / len(batch)).backward()
        part = batch[:1] if rank == 0 else batch[1:]
        model.set_weight(len(part))
        model(part.to(device)).square().sum().backward()
        assert_same(gradients(model), gradients(alone), f"rank {rank}")


HOOKS = {
    "allreduce": lambda model: model.register_comm_hook(model.process_group, default_hooks.allreduce_hook),
    "bfloat16": lambda model: model.register_comm_hook(model.process_group, default_hooks.bf16_compress_hook),
    "half": lambda model: model._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS),
    "built in": lambda model: model._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE),
}


@VIEWS
@pytest.mark.parametrize("hook", HOOKS)
@in_ranks(2, "backend")
def test_communication_hooks_see_the_right_streams(rank: int, world: int, kind: str, hook: str, views: bool) -> None:
    options = {"gradient_as_bucket_view": views, "bucket_cap_mb": 0.001, "set_up": HOOKS[hook]}
    how = {"tolerance": (0.05, 0.01)} if hook in ("bfloat16", "half") else {}
    train_and_compare(rank, world, "mlp", options, device=here(kind), **how)


@VIEWS
@in_ranks(2, "backend")
def test_a_bucket_takes_one_call_each_way(rank: int, world: int, kind: str, views: bool) -> None:
    module = make_model("mlp").to(here(kind))
    model = DistributedDataParallel(module, gradient_as_bucket_view=views, bucket_cap_mb=0.001)
    *before, batch = batches(world, 3)
    for one in before:  # the second one rebuilds the buckets
        backward(model, one, rank)
    buckets = len(model.reducer._get_backward_times().parameters)
    assert buckets > 1
    for kept in (False, True):  # gradients that are views of buckets already need no copy
        model.zero_grad(set_to_none=not kept)
        versions = [parameter.grad._version for parameter in model.parameters() if parameter.grad is not None]
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            backward(model, batch, rank)
        copies = sum(event.name == "aten::_foreach_copy_" for event in profile.events())
        assert copies == (0 if views and kept else buckets) + (0 if views else buckets)
        for parameter, version in zip(model.parameters(), versions, strict=False):
            # Autograd's own addition and, unless the average is made in place, the copy of it.
            assert parameter.grad._version >= version + (1 if views else 2)


class Passing(torch.autograd.Function):
    """Whose forward and backward consist of copies and fills, which the stand-in does in its streams."""

    @staticmethod
    def forward(ctx: Any, scale: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(scale, *parameters)
        return torch.zeros((), device=scale.device)

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        scale, *parameters = ctx.saved_tensors
        return None, *(torch.empty_like(parameter).copy_(scale.expand_as(parameter)) for parameter in parameters)


class Simple(nn.Module):
    """Parameters whose gradients are all equal to the input."""

    def __init__(self, count: int = 6) -> None:
        super().__init__()
        self.parts = nn.ParameterList(torch.zeros(300) for _ in range(count))

    def forward(self, scale: torch.Tensor, used: int | None = None) -> torch.Tensor:
        return Passing.apply(scale, *list(self.parts)[:used])


OPTIONS = {
    "plain": {},
    "views": {"gradient_as_bucket_view": True},
    "nothing unused": {"find_unused_parameters": True},
    "static": {"static_graph": True},
}


@pytest.mark.parametrize("kind", [device_type.NAME], indirect=True)
@pytest.mark.parametrize("env", ["nccl"], indirect=True)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@in_ranks(2, "backend", "env")
def test_steps_with_nccl_do_not_wait_for_the_device(rank: int, world: int, kind: str, options: dict[str, Any]) -> None:
    device = here(kind)
    model = DistributedDataParallel(Simple().to(device), bucket_cap_mb=0.002, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scales = [torch.full((1,), float(rank + step), device=device) for step in range(5)]

    def step(scale: torch.Tensor) -> None:
        optimizer.zero_grad()
        model(scale).backward()
        optimizer.step()

    for scale in scales[:2]:  # the second one rebuilds the buckets
        step(scale)
    before = float(model.module.parts[0][0])
    dist.barrier()
    with stopped(kind):
        for scale in scales[2:]:
            step(scale)  # returns, though the device has not even begun
    expected = before - sum(index + (world - 1) / 2 for index in (2, 3, 4))
    for part in model.module.parts:
        assert part.cpu().tolist() == [expected] * 300


@in_ranks(2, "backend")
def test_averages_are_ready_in_the_stream_that_called_backward(rank: int, world: int, kind: str) -> None:
    device = here(kind)
    model = DistributedDataParallel(Simple().to(device))  # autograd accumulates in the stream that is current now
    scale = torch.full((1,), float(rank), device=device)
    stream = torch.Stream(device)
    stream.wait_stream(torch.accelerator.current_stream())
    stop = stop_stream(kind)
    threading.Timer(0.05, stop.go_on).start()
    with stream:
        model(scale).backward()
        seen = [part.grad.clone() for part in model.module.parts]
    stream.synchronize()
    for gradient in seen:
        assert gradient.cpu().tolist() == [(world - 1) / 2] * 300


@VIEWS
@pytest.mark.parametrize("elsewhere", [0, 1])
@in_ranks(2, "backend")
def test_a_bucket_waits_for_all_streams_of_its_gradients(
    rank: int, world: int, kind: str, elsewhere: int, views: bool
) -> None:
    device = here(kind)
    module = Simple().to(device)
    for part in module.parts:
        part.grad = torch.zeros_like(part)
    stream = torch.Stream(device)
    stream.wait_stream(torch.accelerator.current_stream())
    with stream:
        graph = [part.expand_as(part) for part in list(module.parts)[elsewhere::2]]  # whose gradients are added there
    model = DistributedDataParallel(module, gradient_as_bucket_view=views)
    del graph
    with stream:
        stop = stop_stream(kind)
    threading.Timer(0.05, stop.go_on).start()
    model(torch.full((1,), float(rank), device=device)).backward()
    for part in module.parts:
        assert part.grad.cpu().tolist() == [(world - 1) / 2] * 300


@pytest.mark.parametrize("whole", [True, False])
@in_ranks(2, "backend")
def test_join_with_uneven_inputs(rank: int, world: int, kind: str, whole: bool) -> None:
    check_uneven_join(rank, whole, here(kind))
