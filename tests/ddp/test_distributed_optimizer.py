"""DistributedOptimizer: gradients like those of one process and of DistributedDataParallel.

Nearly all of it runs over Gloo as well, since the reducer works over any backend.
"""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from ddp_cases import Branches
from optimizer_cases import assert_trained_alike, batch, gradients, make, same_everywhere, whole_batch
from ranks import in_ranks
from torch import nn

import ourddp
from ourddp import Compression, DistributedDataParallel

SMALL_BUCKETS = 4 / 1024  # MiB, so that a model of a few kilobytes has several


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
            reduced = optimizer._reducer._get_status().reduced_in_place
            assert reduced == parallel.reducer._get_status().reduced_in_place == 2
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
