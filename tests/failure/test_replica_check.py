"""Replicas that have come apart are found, and the rank, the parameter and the element are named."""

from __future__ import annotations

import random
import re

import pytest
import torch
import torch.distributed as dist
from ranks import in_ranks
from torch import nn
from torch.distributed.tensor import distribute_tensor, init_device_mesh

import ourddp

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex64, torch.complex128)


class Everything(nn.Module):
    """Parameters of all types, in sizes that do and do not fill words, a large one, and a transposed one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        for number, dtype in enumerate(DTYPES):
            for size in (1, 7, 64):
                setattr(self, f"p{number}_{size}", nn.Parameter(torch.randn(size).to(dtype)))
        self.large = nn.Parameter(torch.randn(300, 2000))
        self.turned = nn.Parameter(torch.randn(5, 3).t())
        self.offset = nn.Parameter(torch.randn(32)[1:12])
        self.register_buffer("count", torch.tensor(3))


def flip(tensor: torch.Tensor, element: int, bit: int) -> None:
    """Flip a bit of an element, counted in the order of indices."""
    one = tensor.detach().reshape(-1)[element].clone()
    raw = (torch.view_as_real(one) if one.is_complex() else one.view(1)).view(torch.uint8)
    raw[bit // 8] ^= 1 << bit % 8
    with torch.no_grad():
        index = torch.unravel_index(torch.tensor(element), tensor.shape)
        tensor[index] = one.view(()) if tensor.dim() else one


@in_ranks(4, timeout=120)
def test_each_of_100_flipped_bits_is_found_and_named(rank, world):
    model = Everything()
    names = [name for name, _ in model.named_parameters()]
    chance = random.Random(1)
    ourddp.check_replicas(model)
    for _ in range(100):
        victim, name = chance.randrange(world), chance.choice(names)
        parameter = model.get_parameter(name)
        element, bit = chance.randrange(parameter.numel()), chance.randrange(8 * parameter.element_size())
        if rank == victim:
            flip(parameter, element, bit)
        index = [int(i) for i in torch.unravel_index(torch.tensor(element), parameter.shape)]
        place = re.escape(f"{name}{index}")
        told = rf"rank {victim} differs from the others in {place} \(.* on rank {victim}, .*: bit {bit}\)"
        with pytest.raises(RuntimeError, match=told):
            ourddp.check_replicas(model)
        if rank == victim:
            flip(parameter, element, bit)
    ourddp.check_replicas(model)


@in_ranks(2, "nodes")
def test_of_two_ranks_neither_is_blamed(rank, world):
    model = nn.Linear(3, 2)
    with torch.no_grad():
        model.weight.fill_(1)
        model.bias.fill_(rank)
    with pytest.raises(
        RuntimeError,
        match=r"ranks 0 and 1 differ, and no majority agrees, in bias\[0\] \(1\.0 on rank 1, 0\.0 on rank 0",
    ):
        ourddp.check_replicas(model)


@in_ranks(3)
def test_many_differences_are_told_in_short(rank, world):
    model = nn.ParameterList([nn.Parameter(torch.full((4,), float(rank == 2))) for _ in range(5)])
    with pytest.raises(RuntimeError) as caught:
        ourddp.check_replicas(model)
    text = str(caught.value)
    assert text.count("rank 2 differs from the others in") == 5
    assert text.count("[0]") == 3


@in_ranks(2)
def test_buffers_are_checked_on_request(rank, world):
    torch.manual_seed(0)
    model = nn.BatchNorm1d(2)
    model.running_mean.fill_(rank)
    ourddp.check_replicas(model)
    with pytest.raises(RuntimeError, match="in running_mean"):
        ourddp.check_replicas(model, buffers=True)


@in_ranks(4)
def test_a_group_of_some_ranks(rank, world):
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    model = nn.Linear(1, 1)
    with torch.no_grad():
        model.weight.fill_(rank // 2)
        model.bias.fill_(0)
    ourddp.check_replicas(model, group=pairs[rank // 2])
    with pytest.raises(RuntimeError, match="no majority"):
        ourddp.check_replicas(model)


@in_ranks(2, "backend")
def test_forward_checks_periodically(rank, world):
    model = ourddp.DistributedDataParallel(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), check_replicas_every=3)
    data = torch.randn(4, 2)
    model(data).sum().backward()
    if rank == 1:
        flip(model.module[0].bias, 0, 3)
    with torch.no_grad():
        model(data)  # does not count
    model(data).sum().backward()
    with pytest.raises(RuntimeError, match=r"in 0\.bias\[0\]"):
        model(data)


@in_ranks(2)
def test_join_needs_no_check(rank, world):
    model = ourddp.DistributedDataParallel(nn.Linear(2, 2), check_replicas_every=1)
    with model.join():
        for _ in range(1 + 2 * rank):
            model(torch.randn(1, 2)).sum().backward()


@in_ranks(2)
def test_mistakes_are_explained(rank, world):
    with pytest.raises(ValueError, match="must be the number of forwards"):
        ourddp.DistributedDataParallel(nn.Linear(1, 1), check_replicas_every=0)
    mesh = init_device_mesh("cpu", (world,))
    model = nn.Linear(4, 4)
    model.weight = nn.Parameter(distribute_tensor(model.weight, mesh))
    with pytest.raises(ValueError, match="weight is sharded"):
        ourddp.check_replicas(model)
