"""The learning rates of the linear scaling rule with warm-up."""

from __future__ import annotations

import pytest
import torch
from ranks import in_ranks
from torch import nn

from ourddp import LinearScalingLR


def optimizer_of(*rates: float) -> torch.optim.Optimizer:
    return torch.optim.SGD([{"params": [nn.Parameter(torch.ones(1))], "lr": rate} for rate in rates])


def rates_of(optimizer: torch.optim.Optimizer, schedule: LinearScalingLR, steps: int) -> list[list[float]]:
    seen = [[group["lr"] for group in optimizer.param_groups]]
    for _ in range(steps):
        optimizer.step()
        schedule.step()
        seen.append([group["lr"] for group in optimizer.param_groups])
    assert schedule.get_last_lr() == seen[-1]
    return seen


def test_rates_rise_from_those_of_one_rank_to_the_scaled_ones() -> None:
    optimizer = optimizer_of(0.5, 2.0)
    rates = rates_of(optimizer, LinearScalingLR(optimizer, 4, scale=9), 6)
    assert [first for first, _ in rates] == [0.5, 1.5, 2.5, 3.5, 4.5, 4.5, 4.5]
    assert [second for _, second in rates] == [2.0, 6.0, 10.0, 14.0, 18.0, 18.0, 18.0]


def test_the_training_of_the_paper() -> None:
    """The paper's figures: 0.1 for 256 images, 8,192 of them, 5 epochs of warm-up, a tenth after 30, 60 and 80."""
    optimizer = optimizer_of(0.1)
    schedule = LinearScalingLR(
        optimizer, 5, scale=8192 / 256, decay=lambda epoch: 0.1 ** sum(epoch >= end for end in (30, 60, 80))
    )
    [*rates] = [first for [first] in rates_of(optimizer, schedule, 90)]
    assert rates[:7] == pytest.approx([0.1, 0.72, 1.34, 1.96, 2.58, 3.2, 3.2], rel=1e-12)
    assert [rates[epoch] for epoch in (29, 30, 59, 60, 79, 80, 90)] == pytest.approx(
        [3.2, 0.32, 0.32, 0.032, 0.032, 0.0032, 0.0032], rel=1e-12
    )


def test_without_warm_up_or_with_fewer_samples() -> None:
    optimizer = optimizer_of(1.0)
    assert rates_of(optimizer, LinearScalingLR(optimizer, 0, scale=4), 2) == [[4.0]] * 3
    optimizer = optimizer_of(1.0)
    assert rates_of(optimizer, LinearScalingLR(optimizer, 2, scale=0.5), 3) == [[1.0], [0.75], [0.5], [0.5]]


def test_a_resumed_schedule_goes_on_with_the_scale_of_the_new_run() -> None:
    optimizer = optimizer_of(1.0)
    schedule = LinearScalingLR(optimizer, 4, scale=5, decay=lambda step: 1.0)
    rates_of(optimizer, schedule, 2)
    state, saved = schedule.state_dict(), optimizer.state_dict()
    assert not {"scale", "decay", "optimizer"} & set(state)
    for scale, expected in ((5, [[3.0], [4.0], [5.0]]), (3, [[3.0], [2.5], [3.0]])):
        again = optimizer_of(1.0)
        resumed = LinearScalingLR(again, 4, scale=scale)
        again.load_state_dict(saved)
        resumed.load_state_dict(state)
        assert rates_of(again, resumed, 2) == expected


def test_what_does_not_fit_is_refused() -> None:
    optimizer = optimizer_of(1.0)
    with pytest.raises(ValueError, match="warmup_steps must not be negative; got -1"):
        LinearScalingLR(optimizer, -1, scale=2)
    with pytest.raises(ValueError, match="scale must be positive; got 0"):
        LinearScalingLR(optimizer, 1, scale=0)
    with pytest.raises(RuntimeError, match=r"call ourddp\.init\(\) first"):
        LinearScalingLR(optimizer, 1)


@in_ranks(3)
def test_the_scale_is_the_number_of_ranks(rank: int, world: int) -> None:
    optimizer = optimizer_of(0.5)
    assert rates_of(optimizer, LinearScalingLR(optimizer, 2), 2) == [[0.5], [1.0], [1.5]]
