"""Sizes: different ones on each rank, huge ones, and sums that do not depend on how tensors are cut."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks


def uneven_sizes(rank: int, world: int) -> None:
    mine = torch.full((rank + 1, 2), float(rank))
    everyone = [torch.empty(r + 1, 2) for r in range(world)]
    dist.all_gather(everyone, mine)
    assert all(torch.equal(t, torch.full((r + 1, 2), float(r))) for r, t in enumerate(everyone))
    gathered = [torch.empty(r + 1, 2) for r in range(world)] if rank == 1 else None
    dist.gather(mine, gathered, 1)
    if gathered is not None:
        assert all(torch.equal(t, torch.full((r + 1, 2), float(r))) for r, t in enumerate(gathered))
    piece = torch.empty(rank + 1)
    dist.reduce_scatter(piece, [torch.full((r + 1,), float(r + 10 * rank)) for r in range(world)])
    assert torch.equal(piece, torch.full((rank + 1,), float(rank * world + 10 * sum(range(world)))))
    received = [torch.empty(s, rank) for s in range(world)]
    dist.all_to_all(received, [torch.full((rank, d), float(rank * world + d)) for d in range(world)])
    assert all(torch.equal(t, torch.full((s, rank), float(s * world + rank))) for s, t in enumerate(received))
    parts = [torch.full((r,), float(r)) for r in range(world)] if rank == 0 else None
    part = torch.empty(rank)
    dist.scatter(part, parts, 0)
    assert torch.equal(part, torch.full((rank,), float(rank)))


@pytest.mark.parametrize("world", [2, 3])
def test_sizes_may_differ_between_ranks(rank_pool, world, nodes):
    rank_pool(world, nodes=nodes).run(uneven_sizes)


def huge(rank: int, world: int) -> None:
    count = 2**31 + 17
    tensor = torch.full((count,), rank + 1, dtype=torch.uint8)
    dist.all_reduce(tensor)
    for place in (0, 1, 2**30, 2**31 - 1, 2**31, count - 1):
        assert tensor[place] == 3, place
    tensor[-1] = 40 + rank
    dist.broadcast(tensor, 1)
    assert tensor[-1] == 41


def test_tensors_beyond_two_gibibytes():
    run_ranks(2, huge, timeout=200)


def same_bits(rank: int, world: int) -> bytes:
    generator = torch.Generator().manual_seed(rank)
    whole = torch.randn(100_003, generator=generator)
    one_call = whole.clone()
    dist.all_reduce(one_call)
    for sizes in ([1, 100_002], [40_001, 60_002], [33_333, 33_333, 33_337]):
        pieces = list(whole.clone().split(sizes))
        for piece in pieces:
            dist.all_reduce(piece)
        assert torch.equal(torch.cat(pieces), one_call), f"the bits depend on the cut into {sizes}"
    return one_call.numpy().tobytes()


@pytest.mark.parametrize("world", [3, 4])
def test_sums_have_the_same_bits_on_all_ranks_and_for_any_cut(rank_pool, world, nodes):
    results = rank_pool(world, nodes=nodes).run(same_bits)
    again = rank_pool(world, nodes=nodes).run(same_bits)
    assert len({*results, *again}) == 1
