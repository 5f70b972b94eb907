"""Parameters and the optimizer's state of one rank, given to all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import in_ranks
from torch import nn

import ourddp


def model_of(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.Linear(4, 2))
    model[0].to(memory_format=torch.channels_last)
    model[1].running_mean.fill_(seed)
    model[1].num_batches_tracked.fill_(seed)
    return model


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 0.5)
    optimizer.step()


@in_ranks(3, "backend")
@pytest.mark.parametrize("what", ["state_dict", "named_parameters", "parameters"])
def test_all_ranks_get_the_roots_values(rank: int, world: int, what: str) -> None:
    model, root = model_of(rank), model_of(2)
    ourddp.broadcast_parameters(getattr(model, what)(), root_rank=2)
    for mine, theirs in zip(model.parameters(), root.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    assert model[1].num_batches_tracked == (2 if what == "state_dict" else rank)
    assert model[0].weight.is_contiguous(memory_format=torch.channels_last)


@in_ranks(2)
def test_tensors_that_do_not_match_are_refused_on_all_ranks(rank: int, world: int) -> None:
    with pytest.raises(
        RuntimeError, match=r"broadcast_parameters\(\) takes tensors: rank 1: TypeError: b is of type int"
    ):
        ourddp.broadcast_parameters({"a": torch.ones(1), "b": 3 if rank == 1 else torch.ones(1)})
    with pytest.raises(RuntimeError, match=r"\(a\) is .* on rank 0, which appears not to match .* on rank 1"):
        ourddp.broadcast_parameters({"a": torch.ones(1 + rank)})
    with pytest.raises(ValueError, match="root_rank is -1, but the group has the ranks 0 to 1"):
        ourddp.broadcast_parameters([torch.ones(1)], -1)
    ourddp.broadcast_parameters([])


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": lambda parameters, lr: torch.optim.SGD(parameters, lr=lr, momentum=lr / 10),
    "Adam": lambda parameters, lr: torch.optim.Adam(parameters, lr=lr, betas=(lr / 10, 0.99), amsgrad=True),
    "Adam with tensor rate": lambda parameters, lr: torch.optim.Adam(parameters, lr=torch.tensor(lr)),
    "Rprop": lambda parameters, lr: torch.optim.Rprop(parameters, lr=lr),
    "distributed": lambda parameters, lr: ourddp.DistributedOptimizer(torch.optim.AdamW(parameters, lr=lr)),
}


def assert_same(mine: Any, theirs: Any) -> None:
    assert type(mine) is type(theirs)
    if isinstance(mine, dict):
        assert mine.keys() == theirs.keys()
        for name in mine:
            assert_same(mine[name], theirs[name])
    elif isinstance(mine, list | tuple):
        assert len(mine) == len(theirs)
        for pair in zip(mine, theirs, strict=True):
            assert_same(*pair)
    elif isinstance(mine, torch.Tensor):
        assert mine.dtype == theirs.dtype
        assert torch.equal(mine, theirs)
    else:
        assert mine == theirs


@in_ranks(3, "backend")
@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("others_have_state", [False, True])
def test_all_ranks_get_the_roots_state(rank: int, world: int, kind: str, others_have_state: bool) -> None:
    model = model_of(0)
    optimizer = OPTIMIZERS[kind](model.parameters(), 0.5 + rank)
    torch.optim.lr_scheduler.StepLR(optimizer, 2)  # adds an entry to the groups
    if others_have_state or rank == 1:
        if kind == "distributed":
            super(ourddp.DistributedOptimizer, optimizer).step()  # as a checkpoint that this rank alone has loaded
            for parameter in model.parameters():
                parameter.grad = torch.full_like(parameter, rank)
            super(ourddp.DistributedOptimizer, optimizer).step()
        else:
            for _ in range(1 + rank):
                step(model, optimizer)
    before = optimizer.state_dict()
    ourddp.broadcast_optimizer_state(optimizer, root_rank=1)
    expected = ourddp.broadcast_object(before, 1)
    assert expected["state"]
    assert expected["param_groups"][0]["lr"] == 1.5
    assert_same(optimizer.state_dict(), expected)
    # The state is used, and is the rank's own.
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1.0)
    step(model, optimizer)
    vector = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    everyone = [torch.empty_like(vector) for _ in range(world)]
    dist.all_gather(everyone, vector)
    assert all(torch.equal(vector, other) for other in everyone)


@in_ranks(2)
def test_nested_state_and_lack_of_state_are_broadcast(rank: int, world: int) -> None:
    model = nn.Linear(3, 1)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
    inputs = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (model(inputs) - 1).square().mean()
        loss.backward()
        return loss

    if rank == 0:
        optimizer.step(closure)
    ourddp.broadcast_optimizer_state(optimizer)
    [state] = optimizer.state.values()
    assert len(state["old_dirs"]) > 0
    empty = torch.optim.Adam(model.parameters(), lr=1 + rank)
    if rank == 1:
        step(model, empty)
    ourddp.broadcast_optimizer_state(empty)
    assert not empty.state
    assert empty.param_groups[0]["lr"] == 1


@in_ranks(2)
def test_state_that_does_not_fit_is_an_error_on_all_ranks(rank: int, world: int) -> None:
    parameters = [nn.Parameter(torch.ones(2)) for _ in range(1 + rank)]
    optimizer = torch.optim.Adam(parameters)
    with pytest.raises(RuntimeError, match=r"optimizer's state of rank 0 does not fit: rank 1: ValueError: .*group"):
        ourddp.broadcast_optimizer_state(optimizer)


@in_ranks(2)
def test_sharded_state_is_refused_on_all_ranks(rank: int, world: int) -> None:
    from torch.distributed.fsdp import fully_shard

    model = fully_shard(nn.Linear(4, 4))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    with pytest.raises(
        RuntimeError, match=r"was not broadcast: rank 1: ValueError: it is sharded .*broadcast_from_rank0"
    ):
        ourddp.broadcast_optimizer_state(optimizer, 1)


@in_ranks(2)
def test_state_that_cannot_be_had_is_an_error_on_all_ranks(rank: int, world: int) -> None:
    def refuse(optimizer: torch.optim.Optimizer) -> None:
        raise KeyError("a hook of the program")

    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))])
    optimizer.register_state_dict_pre_hook(refuse)
    with pytest.raises(RuntimeError, match="was not broadcast: rank 0: KeyError: 'a hook of the program'"):
        ourddp.broadcast_optimizer_state(optimizer)
