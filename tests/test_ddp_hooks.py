"""Communication hooks: Python's, c10d's built-in ones, and those that torch ships."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.distributed as dist
from ddp_cases import backward, batches, gradients, loss_of, make_model, reference_gradients, share, train_and_compare
from gradient_cases import inputs_of
from gradient_cases import make_model as make_layers
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import (
    default_hooks,
    post_localSGD_hook,
    powerSGD_hook,
    quantization_hooks,
)
from torch.distributed.optim import _apply_optimizer_in_backward

from ourddp import DistributedDataParallel


def average(state, bucket):
    state.append((bucket.index(), bucket.is_last(), bucket.buffer().numel(), len(bucket.parameters())))
    tensor = bucket.buffer() / dist.get_world_size()
    return dist.all_reduce(tensor, async_op=True).get_future().then(lambda done: done.value()[0])


def _python_hook(rank, world, options):
    calls = []
    options["set_up"] = lambda model: model.register_comm_hook(calls, average)
    result = train_and_compare(rank, world, "mlp", options)
    assert result["logged"]["comm_hook"] == "average"
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


def _asks_for_a_report(rank, world):
    model = DistributedDataParallel(make_model("mlp"))
    asked = []

    def hook(state, bucket):
        asked.append((model.report(), model._get_ddp_logging_data()))
        return average([], bucket)

    model.register_comm_hook(None, hook)
    for batch in batches(world, 3):
        backward(model, batch, rank)
    assert len(asked) == 3


def test_a_hook_may_ask_for_a_report(rank_pool):
    rank_pool(2, "ours").run(_asks_for_a_report)


def _bucket_contents(rank, world):
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
        # What the hook returns is what the parameters get.
        assert all(p.grad.eq(3).all() for p in model.parameters())
    assert seen[0] == 0
    assert len(seen) > 3


def test_a_hook_sees_the_local_gradients(rank_pool, backend):
    rank_pool(2, backend).run(_bucket_contents)


def _failing_hook(rank, world):
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


def test_a_hook_that_fails_fails_backward(rank_pool, backend):
    rank_pool(2, backend).run(_failing_hook)


def _refused(rank, world):
    model = DistributedDataParallel(nn.Linear(8, 1))
    with pytest.raises(TypeError, match="must be callable"):
        model.register_comm_hook(None, 1)

    def wrong(state: object, bucket: int) -> torch.futures.Future[torch.Tensor]:
        raise AssertionError

    with pytest.raises(ValueError, match=r"dist\.GradBucket"):
        model.register_comm_hook(None, wrong)

    # Annotations are strings here, as this file begins with an import from __future__.
    def right(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        return average([], bucket)

    model.register_comm_hook(None, right)
    model(torch.ones(1, 8)).sum().backward()
    torch.testing.assert_close(model.module.weight.grad, torch.ones(1, 8))


def test_hooks_are_checked(rank_pool):
    rank_pool(2, "gloo").run(_refused)


class Averaging:
    """A hook that is an object."""

    def __call__(self, state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        return average(state, bucket)

    def method(self, state, bucket):
        return average(state, bucket)


def scaled(state, bucket, factor):
    return average(state, bucket).then(lambda done: done.value() * factor)


CALLABLES = {
    "partial": (functools.partial(scaled, factor=1.0), "scaled"),
    "partial of a partial": (functools.partial(functools.partial(scaled, factor=2.0), factor=1.0), "scaled"),
    "object": (Averaging(), "Averaging"),
    "method": (Averaging().method, "Averaging.method"),
    "partial of an object": (functools.partial(Averaging()), "Averaging"),
}


def _callable(rank, world, name):
    hook, logged = CALLABLES[name]
    calls = []
    options = {"bucket_cap_mb": 0.002, "set_up": lambda model: model.register_comm_hook(calls, hook)}
    assert train_and_compare(rank, world, "mlp", options)["logged"]["comm_hook"] == logged
    assert calls


@pytest.mark.parametrize("name", CALLABLES)
def test_a_hook_is_any_callable(rank_pool, name):
    rank_pool(2).run(_callable, name)


def _nothing_is_left_of_what_is_refused(rank, world):
    def without_a_bucket(state, other):
        raise AssertionError

    def wrong(state: object, bucket: int) -> torch.futures.Future[torch.Tensor]:
        raise AssertionError

    expected = reference_gradients("mlp", world, 1, lr=0.0)
    batch = next(batches(world, 1))
    model = DistributedDataParallel(make_model("mlp"))
    for refused in (1, without_a_bucket, wrong, functools.partial(wrong), len):
        with pytest.raises((TypeError, ValueError, KeyError)):
            model.register_comm_hook(None, refused)
    calls = []
    model.register_comm_hook(calls, average)
    for again in (average, functools.partial(average)):
        with pytest.raises(RuntimeError, match="registered already"):
            model.register_comm_hook(None, again)
    with pytest.raises(RuntimeError, match="registered already"):
        model._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
    assert model._comm_hooks == [(average, calls)]
    assert model._get_ddp_logging_data()["comm_hook"] == "average"
    backward(model, batch, rank)
    assert calls
    for name, gradient in gradients(model).items():
        torch.testing.assert_close(gradient, expected[0][name])


def test_a_hook_that_is_refused_leaves_nothing_behind(rank_pool):
    rank_pool(2).run(_nothing_is_left_of_what_is_refused)


def _double(state, bucket):
    state.append(bucket.index())
    return average([], bucket).then(lambda done: 2 * done.value())


def _registered_late(rank, world, cls, options, late):
    """Register a hook between forward and backward of step ``late``; return the gradients of all steps."""
    module = make_layers()
    model = cls(module, bucket_cap_mb=0.05, **options)
    calls, found = [], []
    for step in range(4):
        model.zero_grad()
        loss = model(inputs_of(10 * step + rank)).square().mean()
        if step == late:
            model.register_comm_hook(calls, _double)
        loss.backward()
        found.append((list(calls), [parameter.grad.clone() for parameter in module.parameters()]))
        calls.clear()
    return found


@pytest.mark.parametrize(
    "options", [{}, {"gradient_as_bucket_view": True}, {"find_unused_parameters": True}, {"static_graph": True}]
)
@pytest.mark.parametrize("late", [0, 1, 2])
def test_a_hook_between_forward_and_backward_is_used_as_torchs_class_does(rank_pool, options, late):
    theirs, mine = (
        rank_pool(2).run(_registered_late, cls, options, late)
        for cls in (nn.parallel.DistributedDataParallel, DistributedDataParallel)
    )
    for expected, found in zip(theirs, mine, strict=True):
        # Torch's class rebuilds the buckets of a static graph a step later.
        assert [bool(calls) for calls, _ in found] == [bool(calls) for calls, _ in expected]
        assert [bool(calls) for calls, _ in found] == [step >= late for step in range(4)]
        for (_, a), (_, b) in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b)


def _registered_in_backward(rank, world):
    model = DistributedDataParallel(make_layers(), bucket_cap_mb=0.05)
    builtin = dist.BuiltinCommHookType.ALLREDUCE
    said = []

    def register(gradient):
        for attempt in (
            lambda: model.register_comm_hook(None, average),
            lambda: model._register_builtin_comm_hook(builtin),
        ):
            with pytest.raises(RuntimeError, match="before backward begins") as caught:
                attempt()
            said.append(str(caught.value))
        assert model._comm_hooks == []

    for step in range(2):
        model.zero_grad()
        x = inputs_of(10 * step + rank).requires_grad_()
        x.register_hook(register)
        model(x).square().mean().backward()
    assert len(said) == 4
    model.register_comm_hook([], average)


def test_a_hook_in_the_midst_of_backward_is_refused(rank_pool):
    rank_pool(2).run(_registered_in_backward)


def _builtin(rank, world, name):
    kind = getattr(dist.BuiltinCommHookType, name)
    train_and_compare(rank, world, "mlp", {"set_up": lambda model: model._register_builtin_comm_hook(kind)})


def _builtin_half(rank, world):
    expected = reference_gradients("mlp", world, 3, lr=0.0)
    model = DistributedDataParallel(make_model("mlp"))
    model._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
    for step, batch in enumerate(batches(world, 3)):
        model.zero_grad()
        backward(model, batch, rank)
        rounded = False
        for name, gradient in gradients(model).items():
            torch.testing.assert_close(gradient, expected[step][name], rtol=2e-3, atol=1e-4)
            assert torch.equal(gradient, gradient.half().float())
            rounded = rounded or not torch.equal(gradient, expected[step][name])
        assert rounded


def test_builtin_all_reduce(rank_pool, backend):
    rank_pool(2, backend).run(_builtin, "ALLREDUCE")


def test_builtin_half_precision(rank_pool, backend):
    rank_pool(2, backend).run(_builtin_half)


def _shipped(rank, world, name):
    # These start collectives from callbacks, whose order only one bucket makes certain.
    options = {} if name in ("power_sgd", "quantised") else {"bucket_cap_mb": 0.002}
    model = DistributedDataParallel(make_model("mlp"), **options)
    tolerance = 2e-2
    if name == "power_sgd":
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        tolerance = None  # low rank: only what all ranks end up with can be checked
    elif name == "post_local_sgd":
        state = post_localSGD_hook.PostLocalSGDState(None, dist.new_subgroups(1)[0], start_localSGD_iter=100)
        model.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)
    elif name == "quantised":
        model.register_comm_hook(None, quantization_hooks.quantization_pertensor_hook)
    else:
        model.register_comm_hook(None, getattr(default_hooks, name))
    expected = reference_gradients("mlp", world, 4, lr=0.0)
    for step, batch in enumerate(batches(world, 4)):
        model.zero_grad()
        backward(model, batch, rank)
        for key, gradient in gradients(model).items():
            if tolerance:
                torch.testing.assert_close(gradient, expected[step][key], rtol=tolerance, atol=tolerance)
    return [gradient.tolist() for gradient in gradients(model).values()]


SHIPPED = ["allreduce_hook", "fp16_compress_hook", "bf16_compress_hook", "power_sgd", "post_local_sgd", "quantised"]


@pytest.mark.parametrize("name", SHIPPED)
def test_hooks_that_torch_ships(rank_pool, backend, name):
    if name == "quantised" and tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 15):
        pytest.skip("the hook of this torch takes the future of an all_gather for what NCCL's is")
    first, second = rank_pool(2, backend).run(_shipped, name)
    assert first == second


def _fused_optimizer(rank, world, view, part):
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


@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize("part", [False, True])
def test_the_optimizer_can_run_in_backward(rank_pool, backend, view, part):
    rank_pool(2, backend).run(_fused_optimizer, view, part)


def _optimizers_beside_a_hook(rank, world):
    module = make_model("mlp")
    _apply_optimizer_in_backward(torch.optim.SGD, module.parameters(), {"lr": 0.05})
    model = DistributedDataParallel(module)
    model.register_comm_hook([], average)
    inputs = share(next(batches(world, 1)), rank)
    with pytest.raises(RuntimeError, match="registered already"):
        model(inputs)
    # The optimizers still run where torch has put them.
    before = [parameter.clone() for parameter in module.parameters()]
    loss_of(module(inputs)).backward()
    assert not any(torch.equal(a, b) for a, b in zip(before, module.parameters(), strict=True))


def test_optimizers_that_cannot_run_after_the_reduction_are_left_alone(rank_pool):
    rank_pool(2).run(_optimizers_beside_a_hook)


def _buffer_hook(rank, world):
    module = nn.Sequential(nn.Linear(8, 3), nn.BatchNorm1d(3))
    model = DistributedDataParallel(module)

    def add_up(state, named_buffers):
        tensor = named_buffers["1.running_mean"]
        return [dist.all_reduce(tensor, async_op=True).get_future()]

    location = torch.nn.parallel.distributed._BufferCommHookLocation.POST_FORWARD
    model._register_buffer_comm_hook(None, add_up, location)
    model(torch.full((2, 8), rank + 1.0)).sum().backward()
    return module[1].running_mean.tolist()


def test_futures_of_buffer_hooks_are_awaited(rank_pool, backend):
    first, second = rank_pool(2, backend).run(_buffer_hook)
    assert first == second


def _manual(rank, world):
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


def test_backward_can_be_finalised_by_hand(rank_pool, backend):
    if not hasattr(torch.nn.parallel.DistributedDataParallel, "finalize_backward"):
        pytest.skip("this torch has no manual finalization")
    rank_pool(2, backend).run(_manual)
