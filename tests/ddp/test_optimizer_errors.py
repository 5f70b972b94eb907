"""DistributedOptimizer: misuse that is refused."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from ddp_cases import Branches
from optimizer_cases import batch, make
from ranks import in_ranks
from torch import nn

from ourddp import DistributedOptimizer


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
