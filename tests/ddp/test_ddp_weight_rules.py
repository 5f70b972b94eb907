"""The rules of set_weight(): what a weight counts for, ranks without input, and what is a mistake."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ddp_cases import averaging_hook, make_model
from ranks import in_ranks
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from weight_cases import accumulate, assert_close, average_by_hook, expected_gradients

from ourddp import DistributedDataParallel

# --- ranks without input, and reductions without weights -------------------------------------------------------------


def check_join(rank: int, world: int, options: dict[str, Any], hook: bool, whole: bool) -> None:
    alone = make_model("mlp")
    model = DistributedDataParallel(make_model("mlp"), **options)
    if hook:
        average_by_hook(model)
    steps = 2 + 2 * rank
    with model.join(divide_by_initial_world_size=whole):
        for step in range(steps):
            sizes = [[2] if step < 2 else [0], [step + 1]]
            model.zero_grad()
            model.set_weight(sizes[rank][0])
            accumulate(model, rank, sizes, step)
            assert_close(model, expected_gradients(alone, sizes, step))


@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}, {"gradient_as_bucket_view": True}], ids=str)
def test_a_rank_that_has_joined_has_the_weight_0(rank_pool, backend, options):
    for hook in (False, True):
        for whole in (False, True):
            rank_pool(2, backend).run(check_join, options, hook, whole)


@in_ranks(2)
def test_a_rank_without_any_input_learns_that_weights_are_in_use(rank, world):
    model = DistributedDataParallel(nn.Linear(1, 1, bias=False))
    with model.join():
        for _ in range(2 * rank):
            model.zero_grad()
            model.set_weight(4)
            model(torch.full((1, 1), 8.0)).sum().backward()
            assert model.module.weight.grad.item() == 2
    late = DistributedDataParallel(nn.Linear(1, 1))
    with late.join():
        late(torch.ones(1, 1)).sum().backward()
        output = late(torch.ones(1, 1))
        with pytest.raises(RuntimeError, match="must come before forward"):
            late.set_weight(1)
        output.sum().backward()


@in_ranks(2, "backend")
def test_a_weight_counts_for_one_reduction(rank, world):
    for hook in (False, True):
        model = DistributedDataParallel(nn.Linear(1, 1, bias=False))
        if hook:
            average_by_hook(model)
        found = []
        for weight in (None, 3 * rank + 1, None, 0.5):
            model.zero_grad()
            if weight is not None:
                model.set_weight(99)
                model.set_weight(weight)
            with model.no_sync():
                model(torch.ones(1, 1)).sum().backward()
            model(torch.full((1, 1), 4.0 + rank)).sum().backward()
            found.append(model.module.weight.grad.item())
        assert found == pytest.approx([5.5, 11 / 5, 5.5, 11.0])


@in_ranks(2)
def test_gradients_are_zero_if_all_weights_are(rank, world):
    for hook in (False, True):
        model = DistributedDataParallel(make_model("sparse"))
        if hook:
            model.register_comm_hook(None, default_hooks.allreduce_hook)
        model.set_weight(0)
        model(torch.ones(2, 8)).sum().backward()
        assert all(not parameter.grad.to_dense().any() for parameter in model.parameters())


# --- mistakes --------------------------------------------------------------------------------------------------------


@in_ranks(3, "backend")
def test_ranks_that_disagree_get_an_error(rank, world):
    model = DistributedDataParallel(nn.Linear(1, 1))
    for weight in (1, None):
        if weight is not None or rank == 1:
            model.set_weight(1)
        output = model(torch.ones(1, 1)).sum()
        if weight is not None:
            output.backward()
            continue
        here = "and on this one" if rank == 1 else "and not on this one"
        with pytest.raises(RuntimeError, match=rf"set_weight\(\) was called on 1 of 3 ranks before this .*{here}"):
            output.backward()
    # The reducer starts anew.
    model.zero_grad()
    model(torch.ones(1, 1)).sum().backward()
    assert model.module.weight.grad.item() == 1


@in_ranks(2, fresh=True)
def test_ranks_that_disagree_the_first_time_get_an_error(rank, world):
    model = DistributedDataParallel(nn.Linear(1, 1))
    if rank == 1:
        model.set_weight(1)
    # The other one cannot know that weights are the reason.
    hint = "call it on all" if rank == 1 else "SUM"
    with pytest.raises(RuntimeError, match=rf"different collectives(.|\n)*{hint}"):
        model(torch.ones(1, 1)).sum().backward()


@in_ranks(2)
def test_a_hook_is_not_run_if_ranks_disagree(rank, world):
    model = DistributedDataParallel(nn.Linear(1, 1))
    calls: list[Any] = []
    model.register_comm_hook(calls, averaging_hook)
    model.set_weight(1)
    model(torch.ones(1, 1)).sum().backward()
    assert len(calls) == 1
    if rank == 0:
        model.set_weight(1)
    output = model(torch.ones(1, 1)).sum()
    with pytest.raises(RuntimeError, match="was called on 1 of 2 ranks"):
        output.backward()
    assert len(calls) == 1
    model.zero_grad()
    model.set_weight(1 + rank)
    model(torch.ones(1, 1)).sum().backward()
    assert len(calls) == 2
    torch.testing.assert_close(model.module.weight.grad.item(), 2 / 3)


@in_ranks(3)
def test_a_rank_that_has_joined_sees_that_the_others_disagree(rank, world):
    model = DistributedDataParallel(nn.Linear(1, 1))
    model.register_comm_hook([], averaging_hook)
    model.set_weight(1)
    model(torch.ones(1, 1)).sum().backward()
    with pytest.raises(RuntimeError, match="was called on 1 of 2 ranks"), model.join():
        if rank < 2:
            if rank == 0:
                model.set_weight(1)
            model(torch.ones(1, 1)).sum().backward()


@in_ranks(2)
def test_half_precision_averages_stay_finite_once_weights_are_in_use(rank, world):
    model = DistributedDataParallel(nn.Linear(1, 1).half())

    def gradient(weight: int | None) -> float:
        model.zero_grad()
        if weight is not None:
            model.set_weight(weight)
        (40_000 * model(torch.ones(1, 1, dtype=torch.half)).sum()).backward()
        return model.module.weight.grad.item()

    # The sum over two ranks, 80,000, is more than a float16 can hold.
    assert [gradient(None), gradient(20_000), gradient(None)] == [40_000, 2, 40_000]


@in_ranks(1)
def test_what_is_no_weight_is_refused(rank, world):
    model = DistributedDataParallel(nn.Linear(1, 1))
    for weight in (-1, -0.5, float("nan"), float("inf"), 1e-12, 2.0**64, 10**400, "3", None, True, torch.tensor(3)):
        with pytest.raises(ValueError, match="weight"):
            model.set_weight(weight)
    assert not model.reducer._uses_weights()
    model.module.weight.register_hook(lambda gradient: model.set_weight(1))
    with pytest.raises(RuntimeError, match="while gradients are being reduced"):
        model(torch.ones(1, 1)).sum().backward()
