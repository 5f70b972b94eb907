"""NaN and infinite values in gradients: found on all ranks, named with rank and parameter, and skipped on request."""

from __future__ import annotations

import copy
import math
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import in_ranks
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

import ourddp

FOUND = "NaN or infinite values in the gradients of backward "
LARGE = 20_000  # elements of a gradient that is reduced where it lies


class Model(nn.Module):
    """Multiplies inputs with a small and a large parameter, whose gradients are the inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.small = nn.Parameter(torch.ones(2))
        self.large = nn.Parameter(torch.ones(LARGE))

    def forward(self, small: float, large: float) -> torch.Tensor:
        return (self.small * small).sum() + (self.large * large).sum()


class Products(nn.Module):
    """Multiplies its parameters with a number."""

    def __init__(self, factors: list[nn.Parameter]) -> None:
        super().__init__()
        self.factors = nn.ParameterList(factors)

    def forward(self, factor: float) -> torch.Tensor:
        return sum((one * factor).abs().sum() for one in self.factors)


def wrap(reaction: str | None, model: nn.Module | None = None, **options: Any) -> ourddp.DistributedDataParallel:
    return ourddp.DistributedDataParallel(model or Model(), bad_gradients=reaction, **options)


def messages(run: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run()
    return [str(one.message) for one in caught if FOUND in str(one.message)]


def backward(model: nn.Module, small: float, large: float) -> list[str]:
    return messages(lambda: model(small, large).backward())


OPTIONS = [
    {},
    {"gradient_as_bucket_view": True},
    {"find_unused_parameters": True},
    {"static_graph": True},
    {"bucket_cap_mb": 0.001},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@in_ranks(3, "backend")
def test_the_rank_and_its_parameters_are_named_and_all_skip_the_step(rank, world, options):
    model = wrap("skip", **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=1, momentum=0.9, weight_decay=0.1)
    for bad in (math.nan, math.inf, -math.inf):
        for values, names in (((bad, 1), "small"), ((1, bad), "large"), ((bad, bad), "small, large")):
            optimizer.zero_grad()
            assert backward(model, 1, 1) == []
            optimizer.step()
            before = copy.deepcopy(list(model.parameters()))
            optimizer.zero_grad()
            told = backward(model, *(values if rank == 1 else (1, 1)))
            assert len(told) == (rank != 2)  # rank 0, and the one that is to blame
            assert all(f"rank 1 in {names}. All ranks skip" in one and "rank 2" not in one for one in told)
            assert all(parameter.grad is None for parameter in model.parameters())
            optimizer.step()
            assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


@in_ranks(2, "backend")
def test_it_raises_on_all_ranks_and_the_next_step_is_as_good_as_before(rank, world):
    model = wrap("raise")
    for step in range(3):
        with pytest.raises(RuntimeError, match=rf"backward {2 * step + 1}: rank 1 in large\. All ranks raise"):
            model(1, math.inf if rank == 1 else 1).backward()
        model.zero_grad()
        model(rank, 2).backward()
        assert torch.equal(model.module.small.grad, torch.full((2,), 0.5))
        assert torch.equal(model.module.large.grad, torch.full((LARGE,), 2.0))


@in_ranks(2)
def test_several_ranks_are_named_and_of_many_parameters_a_few(rank, world):
    model = wrap("warn", Products([nn.Parameter(torch.ones(1)) for _ in range(12)]))
    [told] = messages(lambda: model(math.nan).backward())
    names = ", ".join(f"factors.{number}" for number in range(8)) + " and 4 more"
    assert f": rank 0 in {names}; rank 1 in {names}." in told
    assert all(parameter.grad.isnan().all() for parameter in model.parameters())


HOOKS = [default_hooks.fp16_compress_hook, default_hooks.bf16_compress_hook, default_hooks.allreduce_hook]


@pytest.mark.parametrize("hook", HOOKS)
@in_ranks(2, "backend")
def test_hooks_may_see_bad_values_or_make_them(rank, world, hook):
    model = wrap("skip")
    model.register_comm_hook(None, hook)
    assert backward(model, 1, 1) == []
    told = backward(model, 1, math.nan if rank == 1 else 1)
    assert all("rank 1 in large" in one for one in told)
    assert model.module.large.grad is None
    told = backward(model, 1, 1e6)  # more than float16 can hold
    if hook is default_hooks.fp16_compress_hook:
        assert len(told) == (rank == 0)
        assert all("were finite, but the averages are not" in one for one in told)
        assert model.module.small.grad is None
    else:
        assert told == []


@in_ranks(2)
def test_powersgd_does_not_hide_the_rank(rank, world):
    model = wrap("warn", nn.Linear(64, 64))
    model.register_comm_hook(powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2), powerSGD_hook.powerSGD_hook)
    for step in range(4):
        data = torch.full((1, 64), math.nan if (rank, step) == (1, 3) else 1.0)
        told = messages(lambda data=data: model(data).sum().backward())
        assert len(told) == (step == 3)
    assert "rank 1 in weight" in told[0]


@in_ranks(2)
def test_a_gradscaler_skips_the_step_by_itself(rank, world):
    model = wrap("warn")
    optimizer = torch.optim.SGD(model.parameters(), lr=1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for values, changes in (((1, 1), True), ((math.inf, 1), False), ((1, 1), True)):
        optimizer.zero_grad()
        before = model.module.large.detach().clone()
        told = messages(lambda v=values: scaler.scale(model(*(v if rank == 1 else (1, 1)))).backward())
        scaler.step(optimizer)
        scaler.update()
        assert len(told) == (not changes)
        assert torch.equal(before, model.module.large) != changes
    assert scaler.get_scale() == 512


@in_ranks(2)
def test_micro_batches_are_one_step(rank, world):
    model = wrap("skip")
    with model.no_sync():
        assert backward(model, math.nan if rank == 1 else 1, 1) == []
    told = backward(model, 1, 1)
    assert all("rank 1 in small." in one for one in told)
    assert model.module.small.grad is None


@in_ranks(2, "backend")
def test_weights_and_complex_gradients(rank, world):
    model = wrap("skip")
    model.set_weight(2)
    assert backward(model, 1, 1) == []
    model.set_weight(2)
    assert len(backward(model, 1, math.nan if rank == 0 else 1)) == (rank == 0)
    number = wrap("skip", Products([nn.Parameter(torch.ones(3, dtype=torch.complex64))]))
    assert messages(lambda: number(1).backward()) == []
    assert len(messages(lambda: number(math.nan if rank == 0 else 1).backward())) == (rank == 0)


@in_ranks(2)
def test_sparse_gradients(rank, world):
    rows = wrap("skip", nn.Embedding(5, 2, sparse=True))
    assert messages(lambda: rows(torch.tensor([rank])).sum().backward()) == []
    told = messages(lambda: (rows(torch.tensor([rank])).sum() * (math.nan if rank == 1 else 1)).backward())
    assert len(told) == 1
    assert "rank 1 in weight" in told[0]


@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}], ids=str)
@in_ranks(2, "backend")
def test_a_rank_without_input_takes_part(rank, world, options):
    model = wrap("skip", **options)
    told = []
    with model.join():
        for step in range(1 + 3 * rank):
            told += backward(model, math.nan if step == 2 else 1, 1)
    assert len(told) == (rank == 1)
    failing = wrap("raise", **options)
    with pytest.raises(RuntimeError, match="of backward 3: rank 1 in small"), failing.join():
        for step in range(1 + 3 * rank):
            failing(math.nan if step == 2 else 1, 1).backward()


@in_ranks(2)
def test_without_it_nothing_is_looked_for_and_with_it_there_is_one_reduction_more(rank, world):
    counts = []
    for reaction in (None, "warn"):
        model = wrap(reaction)
        backward(model, 1, 1)
        before = ourddp.stats().begun
        assert backward(model, 1, 1) == []
        counts.append(ourddp.stats().begun - before)
        if reaction is None:
            assert backward(model, math.nan, 1) == []
    assert counts[1] == counts[0] + 1


@in_ranks(2)
def test_mistakes_are_explained(rank, world):
    with pytest.raises(ValueError, match="bad_gradients must be 'warn', 'raise', 'skip' or None, and not 'stop'"):
        wrap("stop")
    from torch.distributed.optim import _apply_optimizer_in_backward

    model = nn.Linear(1, 1)
    _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 1.0})
    with pytest.raises(ValueError, match="comes too late for optimizers that run in backward"):
        wrap("skip", model)
    dist.barrier()


@in_ranks(2)
def test_a_copied_model_looks_as_well(rank, world):
    model = copy.deepcopy(wrap("warn"))
    assert len(backward(model, math.nan, 1)) == 1
