"""Parameters and buffers: whose values are taken, which stay local, and models that differ."""

from __future__ import annotations

import pytest
import torch
from ddp_cases import (
    batches,
    bitwise_equal_everywhere,
    share,
)
from mismatch_cases import DIFFERENCES, build_different, check_difference
from ranks import in_ranks
from torch import nn

from ourddp import DistributedDataParallel


@pytest.mark.parametrize("init_sync", [True, False])
@in_ranks(3, "backend")
def test_rank_0s_parameters_and_buffers_are_taken_if_asked(rank, world, init_sync):
    torch.manual_seed(rank)
    module = nn.Sequential(nn.Linear(8, 3), nn.BatchNorm1d(3))
    module[1].running_mean.fill_(rank)
    model = DistributedDataParallel(module, init_sync=init_sync)
    equal = {name: bitwise_equal_everywhere(value) for name, value in model.module.state_dict().items()}
    assert equal["0.weight"] == equal["1.running_mean"] == init_sync
    assert not init_sync or all(equal.values()), equal


@pytest.mark.parametrize("broadcast", [True, False])
@in_ranks(2, "backend")
def test_buffers_follow_rank_0_if_asked(rank, world, broadcast):
    module = nn.Sequential(nn.Linear(8, 3), nn.BatchNorm1d(3))
    model = DistributedDataParallel(module, broadcast_buffers=broadcast)
    for batch in batches(world, 3):
        model(share(batch, rank)).sum().backward()
    model.eval()
    model(torch.zeros(1, 8))  # takes the buffers of rank 0 as they were after its last step
    assert bitwise_equal_everywhere(module[1].running_mean) == broadcast


@in_ranks(2, "backend")
def test_ignored_parameters_stay_local(rank, world):
    module = nn.Sequential(nn.Linear(8, 3), nn.Linear(3, 3))
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ["1.weight"])
    model = DistributedDataParallel(module)
    model(torch.full((1, 8), rank + 1.0)).sum().backward()
    assert bitwise_equal_everywhere(module[0].weight.grad)
    assert not bitwise_equal_everywhere(module[1].weight.grad)


@pytest.mark.parametrize("kind", DIFFERENCES)
def test_models_that_differ_are_refused_everywhere(rank_pool, backend, kind):
    messages = rank_pool(3, backend).run(build_different, kind)
    check_difference(kind, messages)


@pytest.mark.parametrize("wrapped", [False, True])
@in_ranks(2)
def test_a_layer_that_only_one_rank_trains_is_named(rank, world, wrapped):
    module = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    module.requires_grad_(False)
    for index in (0, 1, 2, 3) if rank == 0 else (0, 2, 3):
        module[index].requires_grad_()
    with pytest.raises(RuntimeError, match="rank 0 has 8 params, while rank 1 has 6") as error:
        DistributedDataParallel(nn.Sequential(module) if wrapped and rank == 1 else module)
    # The shapes do not tell which layer it is, but the names do if both ranks have the same.
    assert str(error.value).split("has is ")[1].startswith("3.weight" if wrapped else "1.weight")
