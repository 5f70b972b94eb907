"""Tensors that are reduced, gathered and broadcast into new ones."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from ranks import in_ranks

import ourddp


@in_ranks(3, "backend")
def test_an_average_or_another_reduction_is_a_new_tensor(rank: int, world: int) -> None:
    own = torch.full((2, 3), float(rank), requires_grad=True).t()
    assert torch.equal(ourddp.allreduce(own, name="any"), torch.ones(3, 2))
    assert torch.equal(ourddp.allreduce(own, op=ourddp.Sum), torch.full((3, 2), 3.0))
    assert ourddp.allreduce(torch.tensor(rank), op=dist.ReduceOp.MAX) == 2
    assert torch.equal(own, torch.full((3, 2), float(rank)))


@in_ranks(2)
def test_averages_of_integers_are_rounded_towards_zero(rank: int, world: int) -> None:
    assert ourddp.allreduce(torch.tensor([rank, -rank, 1 + 2 * rank])).tolist() == [0, 0, 2]


@in_ranks(3, "backend")
def test_tensors_of_different_lengths_are_gathered(rank: int, world: int) -> None:
    whole = torch.arange(12, dtype=torch.bfloat16).view(6, 2)
    own = whole[[0, 0, 2][rank] : [0, 2, 6][rank]]
    assert torch.equal(ourddp.allgather(own), whole)
    with pytest.raises(RuntimeError, match="Sizes of tensors must match"):
        ourddp.allgather(torch.ones(1, 2 + rank))


@in_ranks(3, "backend")
def test_the_tensor_of_any_rank_is_broadcast(rank: int, world: int) -> None:
    own = torch.full((2, 3), float(rank)).t()
    assert torch.equal(ourddp.broadcast(own, 2), torch.full((3, 2), 2.0))
    assert torch.equal(own, torch.full((3, 2), float(rank)))
    with pytest.raises(ValueError, match="root_rank is 3, but the group has the ranks 0 to 2"):
        ourddp.broadcast(own, 3)


@in_ranks(3)
def test_a_group_of_some_ranks_has_ranks_of_its_own(rank: int, world: int) -> None:
    group = dist.new_group([1, 2])
    if rank == 0:
        return
    own = torch.tensor([float(rank)])
    assert ourddp.allreduce(own, process_group=group) == 1.5
    assert ourddp.allgather(own, process_group=group).tolist() == [1.0, 2.0]
    assert ourddp.broadcast(own, 1, process_group=group) == 2.0
    ourddp.barrier(process_group=group)


@in_ranks(2)
def test_a_barrier_waits_for_all(rank: int, world: int) -> None:
    store = dist.distributed_c10d._get_default_store()
    if rank == 0:
        store.set("rank 0 came", "")
    ourddp.barrier()
    assert store.check(["rank 0 came"])
