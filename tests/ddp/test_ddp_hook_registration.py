"""Which communication hooks may be registered, and when; a hook that is refused leaves nothing behind."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.distributed as dist
from ddp_cases import (
    CLASSES,
    averaging_hook,
    backward,
    batches,
    gradients,
    loss_of,
    make_model,
    reference_gradients,
    share,
    train_and_compare,
)
from gradient_cases import inputs_of
from gradient_cases import make_model as make_layers
from ranks import in_ranks
from torch.distributed.optim import _apply_optimizer_in_backward

from ourddp import DistributedDataParallel


class Averaging:
    """A hook that is an object."""

    def __call__(self, state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        return averaging_hook(state, bucket)

    def method(self, state, bucket):
        return averaging_hook(state, bucket)


def scaled(state, bucket, factor):
    return averaging_hook(state, bucket).then(lambda done: done.value() * factor)


CALLABLES = {
    "partial": (functools.partial(scaled, factor=1.0), "scaled"),
    "partial of a partial": (functools.partial(functools.partial(scaled, factor=2.0), factor=1.0), "scaled"),
    "object": (Averaging(), "Averaging"),
    "method": (Averaging().method, "Averaging.method"),
    "partial of an object": (functools.partial(Averaging()), "Averaging"),
}


@pytest.mark.parametrize("name", CALLABLES)
@in_ranks(2)
def test_a_hook_is_any_callable(rank, world, name):
    hook, logged = CALLABLES[name]
    calls = []
    options = {"bucket_cap_mb": 0.002, "set_up": lambda model: model.register_comm_hook(calls, hook)}
    assert train_and_compare(rank, world, "mlp", options)["logged"]["comm_hook"] == logged
    assert calls


@in_ranks(2, "backend")
def test_a_hook_that_is_refused_leaves_nothing_behind(rank, world):
    def without_a_bucket(state, other):
        raise AssertionError

    def wrong(state: object, bucket: int) -> torch.futures.Future[torch.Tensor]:
        raise AssertionError

    expected = reference_gradients("mlp", world, 1, lr=0.0)
    batch = next(batches(world, 1))
    model = DistributedDataParallel(make_model("mlp"))
    with pytest.raises(TypeError, match="must be callable"):
        model.register_comm_hook(None, 1)
    for refused in (wrong, functools.partial(wrong)):
        with pytest.raises(ValueError, match=r"dist\.GradBucket"):
            model.register_comm_hook(None, refused)
    for refused in (without_a_bucket, len):
        with pytest.raises((TypeError, ValueError, KeyError)):
            model.register_comm_hook(None, refused)
    calls = []
    model.register_comm_hook(calls, averaging_hook)
    for again in (averaging_hook, functools.partial(averaging_hook)):
        with pytest.raises(RuntimeError, match="registered already"):
            model.register_comm_hook(None, again)
    with pytest.raises(RuntimeError, match="registered already"):
        model._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
    assert model._comm_hooks == [(averaging_hook, calls)]
    assert model._get_ddp_logging_data()["comm_hook"] == "averaging_hook"
    backward(model, batch, rank)
    assert calls
    for name, gradient in gradients(model).items():
        torch.testing.assert_close(gradient, expected[0][name])


def _double(state, bucket):
    state.append(bucket.index())
    return averaging_hook([], bucket).then(lambda done: 2 * done.value())


def _registered_late(rank, cls, options, late, register):
    """Register a hook between forward and backward of step ``late``; return the gradients of all steps."""
    module = make_layers()
    model = cls(module, bucket_cap_mb=0.05, **options)
    calls, found = [], []
    for step in range(4):
        model.zero_grad()
        loss = model(inputs_of(10 * step + rank)).square().mean()
        if step == late:
            register(model, calls)
        loss.backward()
        found.append((bool(calls), [parameter.grad.clone() for parameter in module.parameters()]))
        calls.clear()
    return found


@pytest.mark.parametrize(
    "options", [{}, {"gradient_as_bucket_view": True}, {"find_unused_parameters": True}, {"static_graph": True}]
)
@pytest.mark.parametrize("late", [0, 1, 2])
@in_ranks(2)
def test_a_hook_between_forward_and_backward_is_used_as_torchs_class_does(rank, world, options, late):
    def python(model, calls):
        model.register_comm_hook(calls, _double)

    def built_in(model, calls):
        model._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)

    for register in (python, built_in):
        theirs, mine = (_registered_late(rank, cls, options, late, register) for cls in CLASSES)
        for step, ((called, found), (same, expected)) in enumerate(zip(mine, theirs, strict=True)):
            assert called == same == (register is python and step >= late)
            torch.testing.assert_close(found, expected)
            if register is built_in and step >= late:
                assert all(torch.equal(gradient, gradient.half().float()) for gradient in found)


@in_ranks(2)
def test_a_hook_in_the_midst_of_backward_is_refused(rank, world):
    model = DistributedDataParallel(make_layers(), bucket_cap_mb=0.05)
    builtin = dist.BuiltinCommHookType.ALLREDUCE
    said = []

    def register(gradient):
        for attempt in (
            lambda: model.register_comm_hook(None, averaging_hook),
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
    model.register_comm_hook([], averaging_hook)


@in_ranks(2)
def test_optimizers_that_cannot_run_after_the_reduction_are_left_alone(rank, world):
    module = make_model("mlp")
    _apply_optimizer_in_backward(torch.optim.SGD, module.parameters(), {"lr": 0.05})
    model = DistributedDataParallel(module)
    model.register_comm_hook([], averaging_hook)
    inputs = share(next(batches(world, 1)), rank)
    with pytest.raises(RuntimeError, match="registered already"):
        model(inputs)
    # The optimizers still run where torch has put them.
    before = [parameter.clone() for parameter in module.parameters()]
    loss_of(module(inputs)).backward()
    assert not any(torch.equal(a, b) for a, b in zip(before, module.parameters(), strict=True))
