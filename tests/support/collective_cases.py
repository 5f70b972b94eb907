"""What the ranks do in tests that hold wherever the ranks are: on one node, on several, or on hosts of their own."""

from __future__ import annotations

import torch
import torch.distributed as dist
from probes import backend_of


def single_calls(rank: int, world: int) -> None:
    """The calls that only the backend object has, or that have several names."""
    backend = backend_of()
    options = dist.GatherOptions()
    options.rootRank = world - 1
    gather = getattr(dist.group.WORLD, "gather_single", None) or getattr(dist.group.WORLD, "gather_into_tensor", None)
    if gather is not None:
        whole = torch.empty(2 * world) if rank == world - 1 else torch.empty(0)
        gather(whole, torch.full((2,), float(rank)), options).wait()
        if rank == world - 1:
            assert torch.equal(whole, torch.arange(world).repeat_interleave(2).float())
    assert backend.supports_coalescing
    with dist._coalescing_manager(async_ops=True) as manager:
        tensors = [torch.full((n,), float(rank + 1)) for n in (1, 400_000, 3)]
        for tensor in tensors:
            dist.all_reduce(tensor)
    manager.wait()
    assert all(torch.equal(t, torch.full_like(t, sum(range(1, world + 1)))) for t in tensors)
    with dist._coalescing_manager():
        wholes = [torch.empty(world * n) for n in (1, 3)]
        for n, whole in zip((1, 3), wholes, strict=True):
            dist.all_gather_into_tensor(whole, torch.full((n,), float(rank)))
    assert torch.equal(wholes[1], torch.arange(world).repeat_interleave(3).float())
    with dist._coalescing_manager():
        pieces = [torch.empty(n) for n in (1, 3)]
        for n, piece in zip((1, 3), pieces, strict=True):
            dist.reduce_scatter_tensor(piece, torch.ones(world * n))
    assert torch.equal(pieces[1], torch.full((3,), float(world)))
    with dist._coalescing_manager(device=torch.device("cpu"), async_ops=True) as manager:
        one, two = torch.full((1,), float(rank)), torch.full((2,), float(rank))
        dist.broadcast(one, 0, async_op=True)
        dist.broadcast(two, world - 1, async_op=True)
    manager.wait()
    assert one.item() == 0
    assert two[1].item() == world - 1


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


def tags_in_any_order(rank: int, world: int) -> None:
    count = 5
    if rank == 0:
        for tag in range(count):
            dist.send(torch.full((tag + 1,), float(tag)), 1, tag=tag)
    elif rank == 1:
        for tag in reversed(range(count)):
            tensor = torch.empty(tag + 1)
            assert dist.recv(tensor, 0, tag=tag) == 0
            assert torch.equal(tensor, torch.full((tag + 1,), float(tag)))


def ring_in_a_batch(rank: int, world: int) -> None:
    right, left = (rank + 1) % world, (rank - 1) % world
    for _ in range(3):
        incoming = torch.empty(100_000)
        operations = [
            dist.P2POp(dist.irecv, incoming, left),
            dist.P2POp(dist.isend, torch.full((100_000,), float(rank)), right),
        ]
        for work in dist.batch_isend_irecv(operations if rank % 2 else operations[::-1]):
            work.wait()
            assert work.is_completed()
        assert torch.equal(incoming, torch.full((100_000,), float(left)))
