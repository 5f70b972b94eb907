"""Parameters and buffers: whose values are taken, which stay local, and models that differ."""

from __future__ import annotations

import re

import pytest
import torch
from ddp_cases import (
    batches,
    bitwise_equal_everywhere,
    share,
)
from torch import nn

from ourddp import DistributedDataParallel


def _initial_state(rank, world, options):
    torch.manual_seed(rank)
    module = nn.Sequential(nn.Linear(8, 3), nn.BatchNorm1d(3))
    module[1].running_mean.fill_(rank)
    model = DistributedDataParallel(module, **options)
    return [value.clone() for value in model.state_dict().values()]


def test_rank_0s_parameters_and_buffers_are_taken(rank_pool, backend):
    first, *others = rank_pool(3, backend).run(_initial_state, {})
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


def test_init_sync_can_be_left_out(rank_pool):
    first, second = rank_pool(2, "gloo").run(_initial_state, {"init_sync": False})
    assert not torch.equal(first[0], second[0])


def _buffers(rank, world, broadcast):
    module = nn.Sequential(nn.Linear(8, 3), nn.BatchNorm1d(3))
    model = DistributedDataParallel(module, broadcast_buffers=broadcast)
    for batch in batches(world, 3):
        model(share(batch, rank)).sum().backward()
    model.eval()
    model(torch.zeros(1, 8))  # takes the buffers of rank 0 as they were after its last step
    return module[1].running_mean.clone()


@pytest.mark.parametrize("broadcast", [True, False])
def test_buffers_follow_rank_0_if_asked(rank_pool, backend, broadcast):
    means = rank_pool(2, backend).run(_buffers, broadcast)
    assert torch.equal(*means) == broadcast


def _ignored(rank, world):
    module = nn.Sequential(nn.Linear(8, 3), nn.Linear(3, 3))
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ["1.weight"])
    model = DistributedDataParallel(module)
    model(torch.full((1, 8), rank + 1.0)).sum().backward()
    return bitwise_equal_everywhere(module[0].weight.grad), bitwise_equal_everywhere(module[1].weight.grad)


def test_ignored_parameters_stay_local(rank_pool, backend):
    assert rank_pool(2, backend).run(_ignored) == [(True, False)] * 2


def _build_different(rank, world, kind):
    module = nn.Sequential(nn.Linear(8, 3), nn.Linear(3, 5 if kind == "shape" and rank == 1 else 4))
    if kind == "count" and rank == 1:
        module.append(nn.Linear(4, 2))
    if kind == "dtype" and rank == 1:
        module[1].double()
    try:
        DistributedDataParallel(module)
    except RuntimeError as error:
        return str(error)
    return "accepted"


DIFFERENCES = {
    "shape": [r"1\.weight", r"Float \[4, 3\] on rank 0", r"Float \[5, 3\] on rank 1"],
    "dtype": [r"1\.weight", r"Float \[4, 3\] on rank 0", r"Double \[4, 3\] on rank 1"],
    "count": [r"rank 0 has 4 params, while rank 1 has 6", r"2\.weight"],
}


@pytest.mark.parametrize("kind", DIFFERENCES)
def test_models_that_differ_are_refused_everywhere(rank_pool, backend, kind):
    messages = rank_pool(3, backend).run(_build_different, kind)
    assert len(set(messages)) == 1
    for pattern in DIFFERENCES[kind]:
        assert re.search(pattern, messages[0]), messages[0]
