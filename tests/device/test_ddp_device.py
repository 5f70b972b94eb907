"""DistributedDataParallel with parameters on a device: on the stand-in, and on GPUs where there are some."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ddp_cases import assert_same, batches, gradients, loss_of, make_model, reference_gradients, share
from device_cases import here, stop_stream, stopped
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from ourddp import DistributedDataParallel


def _run(rank_pool: Any, kind: str, function: Any, *args: Any) -> None:
    rank_pool(2, f"cpu:ours,{kind}:ours").run(function, kind, *args)


def _train(rank: int, world: int, kind: str, name: str, options: dict[str, Any], **how: Any) -> DistributedDataParallel:
    """Compare each step's gradients with those of one process on the CPU."""
    device = here(kind)
    expected = reference_gradients(name, world, 4)
    model = DistributedDataParallel(make_model(name).to(device), **options)
    if how.get("hook"):
        how["hook"](model)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    for step, batch in enumerate(batches(world, 4)):
        optimizer.zero_grad(set_to_none=how.get("zero", True))
        loss_of(model(share(batch, rank).to(device))).backward()
        found = {name: None if g is None else g.cpu() for name, g in gradients(model).items()}
        if how.get("loosely"):
            for key, gradient in expected[step].items():
                torch.testing.assert_close(found[key], gradient, rtol=0.05, atol=0.01)
        else:
            assert_same(found, expected[step], f"rank {rank} step {step}")
        optimizer.step()
    model._check_reducer_finalized()
    return model


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("mlp", {}),
    "small buckets": ("mlp", {"bucket_cap_mb": 0.001}),
    "views": ("mlp", {"gradient_as_bucket_view": True, "bucket_cap_mb": 0.001}),
    "strides": ("transposed", {}),
    "strides, views": ("transposed", {"gradient_as_bucket_view": True}),
    "unused": ("branches", {"find_unused_parameters": True}),
    "unused, views": ("branches", {"find_unused_parameters": True, "gradient_as_bucket_view": True}),
    "static": ("branches", {"static_graph": True}),
    "static, views": ("branches", {"static_graph": True, "gradient_as_bucket_view": True}),
    "types": ("two_types", {}),
    "types, views": ("two_types", {"gradient_as_bucket_view": True}),
}


def _averages(rank: int, world: int, kind: str, case: str, zero: bool) -> None:
    name, options = CASES[case]
    _train(rank, world, kind, name, options, zero=zero)


@pytest.mark.parametrize("zero", [True, False], ids=["new gradients", "kept gradients"])
@pytest.mark.parametrize("case", CASES)
def test_gradients_are_those_of_one_process(rank_pool: Any, case: str, zero: bool, kind: str) -> None:
    _run(rank_pool, kind, _averages, case, zero)


HOOKS = {
    "allreduce": lambda model: model.register_comm_hook(model.process_group, default_hooks.allreduce_hook),
    "bfloat16": lambda model: model.register_comm_hook(model.process_group, default_hooks.bf16_compress_hook),
    "half": lambda model: model._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS),
    "built in": lambda model: model._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE),
}


def _hooked(rank: int, world: int, kind: str, hook: str, views: bool) -> None:
    options = {"gradient_as_bucket_view": views, "bucket_cap_mb": 0.001}
    _train(rank, world, kind, "mlp", options, hook=HOOKS[hook], loosely=hook in ("bfloat16", "half"))


@pytest.mark.parametrize("views", [False, True], ids=["copies", "views"])
@pytest.mark.parametrize("hook", HOOKS)
def test_communication_hooks_see_the_right_streams(rank_pool: Any, hook: str, views: bool, kind: str) -> None:
    _run(rank_pool, kind, _hooked, hook, views)


def _accumulated(rank: int, world: int, kind: str, views: bool) -> None:
    device = here(kind)
    local = make_model("mlp").to(device)
    model = DistributedDataParallel(make_model("mlp").to(device), gradient_as_bucket_view=views)
    first, second = batches(world, 2)
    with model.no_sync():
        loss_of(model(share(first, rank).to(device))).backward()
    loss_of(model(share(second, rank).to(device))).backward()
    for batch in (first, second):
        for other in range(world):
            (loss_of(local(share(batch, other).to(device))) / world).backward()
    assert_same(gradients(model), gradients(local), f"rank {rank}")


@pytest.mark.parametrize("views", [False, True], ids=["copies", "views"])
def test_gradients_of_no_sync_are_part_of_the_next_average(rank_pool: Any, views: bool, kind: str) -> None:
    _run(rank_pool, kind, _accumulated, views)


def _counted(rank: int, world: int, kind: str, views: bool) -> None:
    model = _train(rank, world, kind, "mlp", {"gradient_as_bucket_view": views, "bucket_cap_mb": 0.001})
    buckets = len(model.reducer._get_backward_times().parameters)
    assert buckets > 1
    device = here(kind)
    (batch,) = batches(world, 1)
    for kept in (False, True):  # gradients that are views of buckets already need no copy
        model.zero_grad(set_to_none=not kept)
        versions = [parameter.grad._version for parameter in model.parameters() if parameter.grad is not None]
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            loss_of(model(share(batch, rank).to(device))).backward()
        copies = sum(event.name == "aten::_foreach_copy_" for event in profile.events())
        assert copies == (0 if views and kept else buckets) + (0 if views else buckets)
        for parameter, version in zip(model.parameters(), versions, strict=False):
            # Autograd's own addition and, unless the average is made in place, the copy of it.
            assert parameter.grad._version >= version + (1 if views else 2)


@pytest.mark.parametrize("views", [False, True], ids=["copies", "views"])
def test_a_bucket_takes_one_call_each_way(rank_pool: Any, kind: str, views: bool) -> None:
    _run(rank_pool, kind, _counted, views)


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


def _stopped(rank: int, world: int, kind: str, options: dict[str, Any]) -> None:
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


@pytest.mark.parametrize(
    "options",
    [{}, {"gradient_as_bucket_view": True}, {"find_unused_parameters": True}, {"static_graph": True}],
    ids=["plain", "views", "nothing unused", "static"],
)
def test_steps_with_nccl_do_not_wait_for_the_device(rank_pool: Any, standin: str, options: dict[str, Any]) -> None:
    rank_pool(2, f"cpu:ours,{standin}:ours", env={"STAND_IN_NCCL": "1"}).run(_stopped, standin, options)


def _in_a_side_stream(rank: int, world: int, kind: str) -> None:
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


def test_averages_are_ready_in_the_stream_that_called_backward(rank_pool: Any, kind: str) -> None:
    _run(rank_pool, kind, _in_a_side_stream)


def _of_two_streams(rank: int, world: int, kind: str, elsewhere: int, views: bool) -> None:
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


@pytest.mark.parametrize("views", [False, True], ids=["copies", "views"])
@pytest.mark.parametrize("elsewhere", [0, 1])
def test_a_bucket_waits_for_all_streams_of_its_gradients(
    rank_pool: Any, kind: str, elsewhere: int, views: bool
) -> None:
    _run(rank_pool, kind, _of_two_streams, elsewhere, views)


def _joined(rank: int, world: int, kind: str, whole: bool) -> list[float]:
    device = here(kind)
    model = DistributedDataParallel(nn.Linear(1, 1, bias=False).to(device))
    history = []
    with model.join(divide_by_initial_world_size=whole):
        for _ in range(2 + rank):
            model.zero_grad()
            model(torch.full((1, 1), 1.0 + rank).to(device)).sum().backward()
            history.append(model.module.weight.grad.item())
    return history


@pytest.mark.parametrize("whole", [True, False])
def test_join_with_uneven_inputs(rank_pool: Any, kind: str, whole: bool) -> None:
    short, long = rank_pool(2, f"cpu:ours,{kind}:ours").run(_joined, kind, whole)
    assert short == [1.5, 1.5]
    assert long == [1.5, 1.5, 1.0 if whole else 2.0]
