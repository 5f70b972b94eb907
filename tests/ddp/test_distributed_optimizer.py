"""DistributedOptimizer: gradients like those of one process and of DistributedDataParallel, and misuse that is refused.

All but the errors of ours runs over Gloo as well, since the reducer works over any backend.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ddp_cases import Branches, Mlp, bitwise_equal_everywhere
from ranks import in_ranks
from torch import nn

import ourddp
from ourddp import Compression, DistributedDataParallel, DistributedOptimizer

PER_RANK = 4
SMALL_BUCKETS = 4 / 1024  # MiB, so that a model of a few kilobytes has several


def batch(step: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(PER_RANK, 8, generator=generator)


def whole_batch(step: int, world: int) -> torch.Tensor:
    return torch.cat([batch(step, rank) for rank in range(world)])


def make(kind: Callable[[], nn.Module] = Mlp, **arguments: Any) -> tuple[nn.Module, DistributedOptimizer]:
    torch.manual_seed(3)
    model = kind()
    inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return model, DistributedOptimizer(inner, model.named_parameters(), **arguments)


def gradients(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.grad for parameter in model.parameters()]


def same_everywhere(model: nn.Module) -> bool:
    return bitwise_equal_everywhere(nn.utils.parameters_to_vector(model.parameters()).detach())


def assert_trained_alike(model: nn.Module, alone: nn.Module, **tolerance: float) -> None:
    for mine, theirs in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, **tolerance)
    assert same_everywhere(model)


# --- the same training -----------------------------------------------------------------------------------------------


@in_ranks(3, "backend", "nodes")
def test_a_training_is_that_of_one_process_on_the_whole_batches(rank: int, world: int) -> None:
    model, optimizer = make(bucket_cap_mb=SMALL_BUCKETS)
    alone = copy.deepcopy(model)
    reference = torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9)
    for step in range(4):
        optimizer.zero_grad()
        reference.zero_grad()
        model(batch(step, rank)).square().mean().backward()
        alone(whole_batch(step, world)).square().mean().backward()
        for mine, theirs in zip(gradients(model), gradients(alone), strict=True):
            torch.testing.assert_close(mine, theirs)
        optimizer.step()
        reference.step()
    assert_trained_alike(model, alone)
    assert len(optimizer._reducer._get_status().bucket_indices) > 1


class Wide(nn.Module):
    """Has gradients of more than 32 KiB, which may be reduced where they lie."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 1024), nn.Tanh(), nn.Linear(1024, 64), nn.Tanh(), nn.Linear(64, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


@in_ranks(2)
def test_gradients_have_the_bits_of_distributed_data_parallel(rank: int, world: int) -> None:
    model, optimizer = make(Wide)
    parallel = DistributedDataParallel(copy.deepcopy(model))
    reference = torch.optim.SGD(parallel.parameters(), lr=0.1, momentum=0.9)
    for step in range(4):
        for each, steps in ((model, optimizer), (parallel, reference)):
            steps.zero_grad()
            each(batch(step, rank)).square().mean().backward()
        assert all(map(torch.equal, gradients(model), gradients(parallel)))
        if step > 0:  # the first backward fills memory that later ones use
            reduced = optimizer._reducer._get_reduced_in_place()
            assert reduced == parallel.reducer._get_reduced_in_place() == 2
        optimizer.step()
        reference.step()
    assert same_everywhere(model)


@in_ranks(2, "backend")
@pytest.mark.parametrize("compression", [Compression.none, Compression.fp16, Compression.bf16])
@pytest.mark.parametrize("op", ["Average", "Sum"])
def test_sums_and_compressed_gradients(rank: int, world: int, compression: Compression, op: str) -> None:
    model, optimizer = make(compression=compression, op=getattr(ourddp, op))
    alone = copy.deepcopy(model)
    whole = alone(whole_batch(0, world)).square().mean()
    (whole * world if op == "Sum" else whole).backward()
    for _ in range(2):  # the second backward is in the rebuilt buckets
        optimizer.zero_grad()
        model(batch(0, rank)).square().mean().backward()
        precision = {Compression.none: 1e-5, Compression.fp16: 2e-3, Compression.bf16: 2e-2}[compression]
        for mine, theirs in zip(gradients(model), gradients(alone), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=precision * float(theirs.abs().max()))
        exact = (
            all(torch.equal(mine, mine.to(compression.value).float()) for mine in gradients(model))
            if compression.value
            else False
        )
        assert exact == (compression is not Compression.none)  # what has travelled in few bits has no more of them
        optimizer.synchronize()
    assert same_everywhere(model)


@in_ranks(2, "backend")
@pytest.mark.parametrize("passes", [2, 3])
def test_several_backward_passes_are_reduced_as_one(rank: int, world: int, passes: int) -> None:
    model, optimizer = make(backward_passes_per_step=passes, bucket_cap_mb=SMALL_BUCKETS)
    alone = copy.deepcopy(model)
    reference = torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9)
    for step in range(3):
        optimizer.zero_grad()
        reference.zero_grad()
        for number in range(passes):
            (model(batch(10 * step + number, rank)).square().mean() / passes).backward()
            (alone(whole_batch(10 * step + number, world)).square().mean() / passes).backward()
            alike = all(map(torch.allclose, gradients(model), gradients(alone)))
            assert alike == (number == passes - 1)
        optimizer.step()
        reference.step()
    assert_trained_alike(model, alone)


@in_ranks(2, "backend")
def test_a_step_may_come_before_its_last_backward_pass(rank: int, world: int) -> None:
    model, optimizer = make(backward_passes_per_step=3)
    alone = copy.deepcopy(model)
    for number in range(2):  # the end of an epoch, say
        model(batch(number, rank)).square().mean().backward()
        alone(whole_batch(number, world)).square().mean().backward()
    optimizer.synchronize()
    for mine, theirs in zip(gradients(model), gradients(alone), strict=True):
        torch.testing.assert_close(mine, theirs)
    optimizer.set_backward_passes_per_step(1)
    optimizer.zero_grad()
    model(batch(0, rank)).square().mean().backward()
    with pytest.raises(RuntimeError, match="cannot be changed between backward and the end of the step"):
        optimizer.set_backward_passes_per_step(2)
    optimizer.step()
    assert same_everywhere(model)


@in_ranks(2, "backend")
def test_ranks_may_use_different_parameters(rank: int, world: int) -> None:
    model, optimizer = make(Branches)
    for step in range(3):
        model.use = ["left", "right"][rank]
        optimizer.zero_grad()
        local = copy.deepcopy(model)
        local(batch(step, rank)).square().mean().backward()
        model(batch(step, rank)).square().mean().backward()
        optimizer.synchronize()
        for mine, own in zip(model.parameters(), local.parameters(), strict=True):
            expected = own.grad.clone() if own.grad is not None else torch.zeros_like(own)
            dist.all_reduce(expected)
            torch.testing.assert_close(mine.grad, expected / world)
        assert not model.never.weight.grad.any()
        with optimizer.skip_synchronize():
            optimizer.step()
        assert same_everywhere(model)


@in_ranks(2, "backend")
def test_a_rank_without_a_backward_takes_part_with_zeros(rank: int, world: int) -> None:
    model, optimizer = make()
    alone = copy.deepcopy(model)
    alone(batch(0, 0)).square().mean().backward()
    if rank == 0:
        model(batch(0, 0)).square().mean().backward()
    optimizer.synchronize()
    for mine, theirs in zip(gradients(model), gradients(alone), strict=True):
        torch.testing.assert_close(mine, theirs / world)


# --- clipping, closures, scalers, schedules --------------------------------------------------------------------------


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


# --- errors ----------------------------------------------------------------------------------------------------------


@in_ranks(2)
def test_gradients_that_would_be_lost_are_not_zeroed(rank: int, world: int) -> None:
    model, optimizer = make(Branches)
    model(batch(0, rank)).sum().backward()
    with pytest.raises(RuntimeError, match=r"zero_grad\(\) was called after backward\(\), and before step\(\)"):
        optimizer.zero_grad()
    optimizer.step()
    optimizer.zero_grad()


@in_ranks(2)
@pytest.mark.parametrize("passes", [1, 2])
def test_too_many_backward_passes_are_noticed(rank: int, world: int, passes: int) -> None:
    model, optimizer = make(backward_passes_per_step=passes)
    for step in range(passes):
        model(batch(step, rank)).sum().backward()
    expected = (
        rf"\(layers\.6\.\w+\) got more gradients before step\(\) than backward_passes_per_step={passes} allows\. Call "
        r"step\(\) or synchronize\(\)"
    )
    with pytest.raises(RuntimeError, match=expected):
        model(batch(0, rank)).sum().backward()
    optimizer.step()


@in_ranks(2)
def test_a_step_with_gradients_of_this_rank_alone_is_refused(rank: int, world: int) -> None:
    model, optimizer = make(Branches)
    for _ in range(2):
        model(batch(0, rank)).sum().backward()
        with (
            optimizer.skip_synchronize(),
            pytest.raises(RuntimeError, match=r"call synchronize\(\) after backward\(\)"),
        ):
            optimizer.step()
        optimizer.step()
        optimizer.zero_grad()


@in_ranks(2)
def test_models_that_differ_are_refused_on_all_ranks(rank: int, world: int) -> None:
    model = nn.Linear(8, 3 + rank)
    with pytest.raises(
        RuntimeError, match=r"\(weight\) is .*3.* on rank 0, which appears not to match .*4.* on rank 1"
    ):
        DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())


@in_ranks(1)
def test_arguments_that_do_not_fit_are_refused(rank: int, world: int) -> None:
    model = nn.Linear(8, 3)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    named = list(model.named_parameters())
    refused = [
        ({"named_parameters": [("a", model.weight), ("a", model.bias)]}, "must be unique; found several of a"),
        ({"named_parameters": named[:1]}, r"leaves out .*: parameter 1 of group 0 \(shape \(3,\)\)"),
        ({"named_parameters": model.parameters()}, "must be pairs of a name and a parameter"),
        ({"compression": "fp16"}, r"must be Compression\.none, \.fp16 or \.bf16; got 'fp16'"),
        ({"op": dist.ReduceOp.MAX}, r"op must be ourddp\.Average or ourddp\.Sum"),
        ({"backward_passes_per_step": 0}, "must be an int of at least 1; got 0"),
        ({"bucket_cap_mb": 0}, "bucket_cap_mb must be positive"),
    ]
    for arguments, message in refused:
        with pytest.raises(ValueError, match=message):
            DistributedOptimizer(inner, **arguments)
    with pytest.raises(ValueError, match=r"must be a torch\.optim\.Optimizer; got Linear"):
        DistributedOptimizer(model)
    optimizer = DistributedOptimizer(inner, named)
    with pytest.raises(ValueError, match="wrap it once"):
        DistributedOptimizer(optimizer)
    with pytest.raises(RuntimeError, match="cannot be added to a DistributedOptimizer"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    with pytest.raises(TypeError, match="can be neither copied nor pickled"):
        copy.deepcopy(optimizer)
    model.requires_grad_(False)
    with pytest.raises(ValueError, match="none of the optimizer's parameters requires a gradient"):
        DistributedOptimizer(inner, named)
