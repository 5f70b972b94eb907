"""Backwards of all kinds: gradients in the loss, several forwards, windows without a reduction, lazy buckets."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from ddp_cases import (
    CLASSES,
    TorchDDP,
    assert_same,
    backward,
    batches,
    gradients,
    known,
    loss_of,
    make_model,
    outcome,
    share,
    train,
)
from ranks import in_ranks
from torch import nn

from ourddp import DistributedDataParallel

PENALISED: dict[str, dict[str, Any]] = {
    "plain": {},
    "view": {"gradient_as_bucket_view": True},
    "unused": {"find_unused_parameters": True},
    "static": {"static_graph": True},
    "static_view": {"static_graph": True, "gradient_as_bucket_view": True},
}


@pytest.mark.parametrize("options", PENALISED.values(), ids=PENALISED)
@in_ranks(2)
def test_a_gradient_penalty(rank, world, options):
    """Gradients of a loss with a gradient in it, in the first step as in later ones."""
    models = (TorchDDP(make_model("mlp")), DistributedDataParallel(make_model("mlp"), **options))
    for step, batch in enumerate(batches(world, 3)):
        for model in models:
            model.zero_grad()
            x = share(batch, rank).clone().requires_grad_()
            loss = loss_of(model(x))
            (slope,) = torch.autograd.grad(loss, x, create_graph=True)
            (loss + slope.square().sum()).backward()
        assert_same(gradients(models[1]), gradients(models[0]), f"rank {rank} step {step}")


@in_ranks(2, "backend")
def test_gradients_of_averaged_gradients_are_those_of_this_rank(rank, world):
    """A backward that torch's class refuses as soon as a layer has a bias."""
    model = DistributedDataParallel(nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1)))
    alone = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1))
    alone.load_state_dict(model.module.state_dict())
    x = torch.full((2, 3), rank + 1.0)
    local = torch.autograd.grad(alone(x).square().sum(), list(alone.parameters()), create_graph=True)
    kind, text = outcome(lambda: model(x).square().sum().backward(create_graph=True))
    assert kind == "UserWarning"
    assert "create_graph=True" in text
    average = [gradient.detach().clone() for gradient in local]
    for gradient in average:
        dist.all_reduce(gradient, dist.ReduceOp.AVG)
    weights = [torch.full_like(gradient, 0.5) for gradient in local]
    expected = torch.autograd.grad(local, list(alone.parameters()), weights, allow_unused=True)
    parameters = list(model.parameters())
    for parameter, gradient in zip(parameters, average, strict=True):
        torch.testing.assert_close(parameter.grad.detach(), gradient)
    slopes = torch.autograd.grad([p.grad for p in parameters], parameters, weights, allow_unused=True)
    for mine, theirs in zip(slopes, expected, strict=True):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True}, {"find_unused_parameters": True}])
@in_ranks(2)
def test_forwards_before_backwards(rank, world, options):
    results = []
    for cls in CLASSES:
        model = cls(make_model("mlp"), **options)
        found = []
        for batch in batches(world, 3):
            model.zero_grad()
            losses = [loss_of(model(share(batch, rank) * factor)) for factor in (1.0, 2.0, 3.0)]
            # The first backward reduces; the others add what is local, as no forward has come before them.
            for loss in losses:
                loss.backward()
                found.append(gradients(model))
        results.append(found)
    for step, (theirs, mine) in enumerate(zip(*results, strict=True)):
        assert_same(mine, theirs, f"rank {rank} backward {step}")


@pytest.mark.parametrize("others", [["left", "right", "left"], ["left", "left", "left"]], ids=["alike", "different"])
@pytest.mark.parametrize("view", [False, True])
@in_ranks(2, "backend")
def test_used_means_used_since_the_last_reduction(rank, world, view, others):
    """The last step of a window may not use what an earlier one has used, on this rank or on another."""
    uses = ["left", "right", "left"] if rank == 0 else others
    results = []
    for cls in CLASSES:
        model = cls(make_model("branches"), find_unused_parameters=True, gradient_as_bucket_view=view)
        found = []
        for start in range(2):
            model.zero_grad()
            for step, batch in enumerate(batches(world, len(uses))):
                model.module.use = uses[(step + start) % len(uses)]
                if step < 2:
                    with model.no_sync():
                        backward(model, batch, rank)
                else:
                    backward(model, batch, rank)
            found.append(gradients(model))
        results.append(found)
    for window, (theirs, mine) in enumerate(zip(*results, strict=True)):
        assert_same(mine, theirs, f"rank {rank} window {window}")


@pytest.mark.parametrize("name", ["mlp", "branches"])  # torch's class cannot join with sparse gradients
@pytest.mark.parametrize("view", [False, True])
@in_ranks(2)
def test_buckets_that_exist_only_in_backward(rank, world, view, name):
    options = {"find_unused_parameters": True, "gradient_as_bucket_view": view, "lazy_bucket_allocation": True}
    results = []
    for cls in CLASSES:
        model = cls(make_model(name), bucket_cap_mb=0.001, **known(options))
        with model.no_sync():
            backward(model, next(batches(world, 1)), rank)
        found = [train(model, rank, world)]
        with model.join():
            for batch in batches(world, 1 + rank):
                backward(model, batch, rank)
        found.append(gradients(model))
        results.append(found)
    for part, (theirs, mine) in enumerate(zip(*results, strict=True)):
        assert_same(mine, theirs, f"rank {rank} part {part}")


@pytest.mark.parametrize("options", [{}, {"lazy_bucket_allocation": True}])
@in_ranks(2)
def test_joining_with_sparse_gradients(rank, world, options):
    model = DistributedDataParallel(make_model("sparse"), **known(options))
    with model.join():
        for step, batch in enumerate(batches(world, 1 + rank)):
            model.zero_grad()
            backward(model, batch, rank)
            if step > 0:  # the other rank has run out of input, and counts as having no gradient
                alone = make_model("sparse")
                (loss_of(alone(share(batch, rank))) / world).backward()
                assert_same(gradients(model), gradients(alone), f"rank {rank}")
