"""Sizes: different ones on each rank, very large ones, and sums that do not depend on how tensors are cut."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from collective_cases import same_bits, uneven_sizes
from ranks import in_ranks


@pytest.mark.parametrize("world", [2, 3])
def test_sizes_may_differ_between_ranks(rank_pool, world, nodes):
    rank_pool(world, nodes=nodes).run(uneven_sizes)


@pytest.mark.parametrize("world", [2, 3])
@in_ranks(None, "nodes")
def test_messages_with_a_root_of_any_length(rank: int, world: int) -> None:
    # Where ranks with cores of their own begin to copy at once, and where they stop to.
    piece, most = 128 << 10, 1 << 20
    for size in (piece - 1, piece, piece + 1, 3 * piece + 5, most, most + 1, 3 * most):
        for root in range(world):
            sent = [(torch.arange(size) * (r + 3) % 251).to(torch.uint8) for r in range(world)]
            tensor = sent[root].clone() if rank == root else torch.zeros(size, dtype=torch.uint8)
            dist.broadcast(tensor, root)
            assert torch.equal(tensor, sent[root]), (size, root)
            gathered = [torch.zeros_like(tensor) for _ in range(world)] if rank == root else None
            dist.gather(sent[rank], gathered, root)
            assert rank != root or all(map(torch.equal, gathered, sent)), (size, root)
            received = torch.zeros_like(tensor)
            dist.scatter(received, sent if rank == root else None, root)
            assert torch.equal(received, sent[rank]), (size, root)
    # Some ranks lend their memory, and others do not.
    sent = [torch.full((most + (r - 1) * piece,), r + 1, dtype=torch.uint8) for r in range(world)]
    gathered = [torch.zeros_like(tensor) for tensor in sent]
    dist.gather(sent[rank], gathered if rank == 0 else None, 0)
    assert rank != 0 or all(map(torch.equal, gathered, sent))


@in_ranks(2, fresh=True, timeout=200)
def test_tensors_of_more_than_two_gibibytes(rank: int, world: int) -> None:
    count = 2**31 + 17
    tensor = torch.full((count,), rank + 1, dtype=torch.uint8)
    dist.all_reduce(tensor)
    for place in (0, 1, 2**30, 2**31 - 1, 2**31, count - 1):
        assert tensor[place] == 3, place
    tensor[-1] = 40 + rank
    dist.broadcast(tensor, 1)
    assert tensor[-1] == 41


@pytest.mark.parametrize("world", [3, 4])
def test_sums_have_the_same_bits_on_all_ranks_and_for_any_cut(rank_pool, world, nodes):
    results = rank_pool(world, nodes=nodes).run(same_bits)
    again = rank_pool(world, nodes=nodes).run(same_bits)
    assert len({*results, *again}) == 1
