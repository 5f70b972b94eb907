"""Communication hooks: Python's, c10d's built-in ones, and those that torch ships."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from ddp_cases import (
    TorchDDP,
    averaging_hook,
    backward,
    batches,
    bitwise_equal_everywhere,
    gradients,
    loss_of,
    make_model,
    reference_gradients,
    share,
    train_and_compare,
)
from ranks import in_ranks
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward

from ourddp import DistributedDataParallel


def _python_hook(rank, world, options):
    calls = []
    options["set_up"] = lambda model: model.register_comm_hook(calls, averaging_hook)
    result = train_and_compare(rank, world, "mlp", options)
    assert result["logged"]["comm_hook"] == "averaging_hook"
    last_step = calls[-len(result["buckets"]) :]
    assert [call[0] for call in last_step] == list(range(len(result["buckets"])))
    assert [call[1] for call in last_step] == [False] * (len(last_step) - 1) + [True]
    assert [call[3] for call in last_step] == [len(bucket) for bucket in result["buckets"]]
    assert sum(call[2] for call in last_step) == sum(p.numel() for p in make_model("mlp").parameters())


@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize("static", [False, True])
def test_a_python_hook_with_a_future(rank_pool, backend, view, static):
    options = {"bucket_cap_mb": 0.002, "gradient_as_bucket_view": view, "static_graph": static}
    rank_pool(2, backend).run(_python_hook, options)


@in_ranks(2)
def test_a_hook_may_ask_for_a_report(rank, world):
    model = DistributedDataParallel(make_model("mlp"))
    asked = []

    def hook(state, bucket):
        asked.append((model.report(), model._get_ddp_logging_data()))
        return averaging_hook([], bucket)

    model.register_comm_hook(None, hook)
    for batch in batches(world, 3):
        backward(model, batch, rank)
    assert len(asked) == 3


@in_ranks(2, "backend")
def test_a_hook_sees_the_local_gradients(rank, world):
    seen = []

    def hook(state, bucket):
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
            assert parameter.shape == gradient.shape
            torch.testing.assert_close(gradient, parameter.grad)
        seen.append(bucket.index())
        future = torch.futures.Future()
        future.set_result(bucket.buffer() * 0 + 3)
        return future

    model = DistributedDataParallel(make_model("mlp"), bucket_cap_mb=0.002)
    model.register_comm_hook(None, hook)
    for _ in range(2):
        model.zero_grad()
        loss_of(model(torch.full((2, 8), rank + 1.0))).backward()
        # The parameters get what the hook returns.
        assert all(p.grad.eq(3).all() for p in model.parameters())
    assert seen[0] == 0
    assert len(seen) > 3


@in_ranks(2, "backend")
def test_a_hook_that_fails_fails_backward(rank, world):
    def hook(state, bucket):
        raise ValueError("no way")

    model = DistributedDataParallel(nn.Linear(8, 1))
    model.register_comm_hook(None, hook)
    with pytest.raises((RuntimeError, ValueError), match="no way"):
        model(torch.ones(1, 8)).sum().backward()

    def failing_later(state, bucket):
        return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda done: 1 / 0)

    model = DistributedDataParallel(nn.Linear(8, 1))
    model.register_comm_hook(None, failing_later)
    with pytest.raises((RuntimeError, ZeroDivisionError), match="division by zero"):
        model(torch.ones(1, 8)).sum().backward()


@in_ranks(2, "backend")
def test_the_optimizer_of_a_sparse_gradient_can_run_in_backward(rank, world):
    torch.manual_seed(0)
    module = nn.Sequential(nn.Embedding(10, 8, sparse=True), nn.Linear(8, 1))
    alone = copy.deepcopy(module)
    _apply_optimizer_in_backward(torch.optim.SGD, module.parameters(), {"lr": 0.5})
    model = DistributedDataParallel(module)
    optimizer = torch.optim.SGD(alone.parameters(), 0.5)
    for step in range(3):
        rows = [torch.tensor([step, other + 4, 4]) for other in range(world)]
        model(rows[rank]).square().sum().backward()
        assert all(parameter.grad is None for parameter in module.parameters())
        optimizer.zero_grad()
        for own in rows:
            (alone(own).square().sum() / world).backward()
        optimizer.step()
        for one, other in zip(module.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(one, other)


@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize("part", [False, True])
@in_ranks(2, "backend")
def test_the_optimizer_can_run_in_backward(rank, world, view, part):
    module = make_model("mlp")
    alone = make_model("mlp")
    fused = [p for name, p in module.named_parameters() if not (part and "layers.2" in name)]
    _apply_optimizer_in_backward(torch.optim.SGD, fused, {"lr": 0.05})
    model = DistributedDataParallel(module, bucket_cap_mb=0.002, gradient_as_bucket_view=view)
    rest = [parameter for parameter in module.parameters() if not hasattr(parameter, "_in_backward_optimizers")]
    assert len(rest) == (2 if part else 0)
    optimizer = torch.optim.SGD(alone.parameters(), 0.05)
    for step, batch in enumerate(batches(world, 4)):
        if step == 1:  # part of the next step
            with model.no_sync():
                backward(model, batch, rank)
            before = batch
            continue
        backward(model, batch, rank)
        assert all(parameter.grad is None for parameter in fused)
        for parameter in rest:
            parameter.data -= 0.05 * parameter.grad
            parameter.grad = None
        optimizer.zero_grad()
        for other in range(world):
            (loss_of(alone(share(batch, other))) / world).backward()
            if step == 2:
                (loss_of(alone(share(before, other))) / world).backward()
        optimizer.step()
        for mine, theirs in zip(module.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(mine, theirs)


@in_ranks(2, "backend")
def test_futures_of_buffer_hooks_are_awaited(rank, world):
    module = nn.Sequential(nn.Linear(8, 3), nn.BatchNorm1d(3))
    model = DistributedDataParallel(module)

    def add_up(state, named_buffers):
        tensor = named_buffers["1.running_mean"]
        return [dist.all_reduce(tensor, async_op=True).get_future()]

    location = torch.nn.parallel.distributed._BufferCommHookLocation.POST_FORWARD
    model._register_buffer_comm_hook(None, add_up, location)
    model(torch.full((2, 8), rank + 1.0)).sum().backward()
    assert bitwise_equal_everywhere(module[1].running_mean)


@pytest.mark.skipif(not hasattr(TorchDDP, "finalize_backward"), reason="this torch has no manual finalization")
@in_ranks(2, "backend")
def test_backward_can_be_finalised_by_hand(rank, world):
    expected = reference_gradients("mlp", world, 3, lr=0.0)
    model = DistributedDataParallel(make_model("mlp"), bucket_cap_mb=0.002)
    model.require_manual_backward_finalization = True
    with pytest.raises(RuntimeError, match="no gradient reduction to finalize"):
        model.finalize_backward()
    for step, batch in enumerate(batches(world, 3)):
        model.zero_grad()
        out = model(share(batch, rank))
        assert model.should_finalize_after_backward == (step == 0)
        with pytest.raises(RuntimeError, match="cannot be switched"):
            model.require_manual_backward_finalization = False
        with pytest.raises(RuntimeError, match="before all gradient buckets were ready"):
            model.finalize_backward()
        loss_of(out).backward()
        model.finalize_backward()
        for name, gradient in gradients(model).items():
            torch.testing.assert_close(gradient, expected[step][name])


@pytest.mark.skipif(not hasattr(TorchDDP, "finalize_backward"), reason="this torch has no manual finalization")
@in_ranks(2, "backend")
def test_backward_cannot_be_finalised_if_a_bucket_was_not_launched(rank, world):
    model = DistributedDataParallel(make_model("mlp"), bucket_cap_mb=0.002)
    model.require_manual_backward_finalization = True

    def hook(state, bucket):
        if bucket.is_last():
            raise ValueError("no room")
        return averaging_hook([], bucket)

    model.register_comm_hook(None, hook)
    with pytest.raises(ValueError, match="no room"):
        loss_of(model(share(next(iter(batches(world, 1))), rank))).backward()
    with pytest.raises(RuntimeError, match="before all gradient buckets were ready"):
        model.finalize_backward()
