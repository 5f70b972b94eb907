"""DistributedOptimizer with clipped gradients, closures, scalers, schedules and hooks, around any optimizer."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from ddp_cases import Mlp
from optimizer_cases import assert_trained_alike, batch, gradients, make, same_everywhere, whole_batch
from ranks import in_ranks
from torch import nn

import ourddp
from ourddp import DistributedOptimizer


@in_ranks(2, "backend")
def test_gradients_are_clipped_once_they_are_averages(rank: int, world: int) -> None:
    model, optimizer = make()
    before = copy.deepcopy(model)
    model(batch(0, rank)).square().mean().backward()
    optimizer.synchronize()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    assert norm > 0.01
    with optimizer.skip_synchronize():
        optimizer.step()
    moved = torch.cat([(a - b).flatten() for a, b in zip(before.parameters(), model.parameters(), strict=True)])
    torch.testing.assert_close(moved.norm(), torch.tensor(0.1 * 0.01), rtol=1e-3, atol=0)
    assert same_everywhere(model)


@in_ranks(2, "backend")
def test_what_has_been_synchronized_is_not_reduced_again(rank: int, world: int) -> None:
    model, optimizer = make(op=ourddp.Sum)
    model(batch(0, rank)).square().mean().backward()
    optimizer.synchronize()
    expected = [gradient.clone() for gradient in gradients(model)]
    optimizer.step()  # without skip_synchronize()
    assert all(map(torch.equal, gradients(model), expected))


@in_ranks(2, "backend")
def test_a_closure_gets_averages_each_time(rank: int, world: int) -> None:
    torch.manual_seed(1)
    model = nn.Linear(8, 1)
    alone = copy.deepcopy(model)
    settings = {"lr": 0.5, "max_iter": 4, "tolerance_change": 0}

    def closure_of(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: torch.Tensor) -> Callable[[], Any]:
        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = (model(inputs) - 1).square().mean()
            loss.backward()
            return loss

        return closure

    optimizer = DistributedOptimizer(torch.optim.LBFGS(model.parameters(), **settings))
    reference = torch.optim.LBFGS(alone.parameters(), **settings)
    for _ in range(2):
        optimizer.step(closure_of(model, optimizer, batch(0, rank)))
        reference.step(closure_of(alone, reference, whole_batch(0, world)))
    assert_trained_alike(model, alone, rtol=1e-4, atol=1e-5)


@in_ranks(2)
def test_a_closure_may_synchronize_by_itself(rank: int, world: int) -> None:
    model, optimizer = make(op=ourddp.Sum)
    summed = []

    def closure() -> None:
        optimizer.zero_grad()
        model(batch(0, rank)).square().mean().backward()
        optimizer.synchronize()
        summed.extend(gradient.clone() for gradient in gradients(model))

    optimizer.step(closure)
    assert all(map(torch.equal, gradients(model), summed))
    assert same_everywhere(model)


@in_ranks(2)
def test_a_step_that_was_left_out_does_not_count_for_the_next(rank: int, world: int) -> None:
    model, optimizer = make()
    model(batch(0, rank)).square().mean().backward()
    optimizer.synchronize()
    optimizer.zero_grad()
    if rank == 0:
        model(batch(1, rank)).square().mean().backward()
    optimizer.step()  # rank 1 takes part
    assert same_everywhere(model)


@in_ranks(2)
def test_a_grad_scaler_skips_the_step_on_all_ranks(rank: int, world: int) -> None:
    model, optimizer = make()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    before = copy.deepcopy(model)
    for overflows in (True, False):
        optimizer.zero_grad()
        factor = float("inf") if overflows and rank == 1 else 1.0
        scaler.scale(model(batch(0, rank)).square().mean() * factor).backward()
        optimizer.synchronize()
        scaler.unscale_(optimizer)
        with optimizer.skip_synchronize():
            scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == 1.0  # halved by the overflow
        moved = any(not torch.equal(a, b) for a, b in zip(before.parameters(), model.parameters(), strict=True))
        assert moved != overflows
        assert same_everywhere(model)


@in_ranks(2)
def test_schedules_and_hooks_work_on_it(rank: int, world: int) -> None:
    model = Mlp()
    dist.broadcast(model.layers[0].weight.data, 0)
    inner = torch.optim.SGD(model.parameters(), lr=1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.optim.lr_scheduler.ExponentialLR(inner, 0.5)  # leaves a step() of its own in the optimizer
        ourddp.broadcast_parameters(model.state_dict())
        optimizer = DistributedOptimizer(inner, model.named_parameters())
        assert type(optimizer).__name__ == "SGD"
        assert isinstance(optimizer, torch.optim.SGD)
        assert isinstance(optimizer, DistributedOptimizer)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        calls = []
        optimizer.register_step_pre_hook(lambda *_: calls.append([g.clone() for g in gradients(model)]))
        optimizer.load_state_dict(optimizer.state_dict())
        for step in range(2):
            optimizer.zero_grad()
            model(batch(step, rank)).square().mean().backward()
            optimizer.step()
            schedule.step()
    assert len(calls) == 2
    assert all(map(torch.equal, calls[-1], gradients(model)))
    assert optimizer.param_groups[0]["lr"] == 0.25
    assert same_everywhere(model)


@in_ranks(2)
def test_the_moments_of_the_wrapped_optimizer_are_kept(rank: int, world: int) -> None:
    model = nn.Linear(8, 1)
    ourddp.broadcast_parameters(model.state_dict())
    inner = torch.optim.Adam(model.parameters(), lr=0.1)
    model(batch(0, 0)).sum().backward()
    inner.step()
    optimizer = DistributedOptimizer(inner, model.named_parameters())
    assert optimizer.state[model.weight]["step"] == 1
    optimizer.zero_grad()
    model(batch(1, rank)).sum().backward()
    optimizer.step()
    assert optimizer.state[model.weight]["step"] == 2
