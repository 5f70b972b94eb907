"""Ways to call a collective: coalesced, with one tensor for all ranks, functional, and wrongly."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from probes import backend_of


def single_calls(rank: int, world: int) -> None:
    """The calls that only the backend object has, or that go by several names."""
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


@pytest.mark.parametrize("world", [1, 3])
def test_coalescing_and_single_tensor_calls(rank_pool, world, nodes):
    rank_pool(world, nodes=nodes).run(single_calls)


def functional(rank: int, world: int) -> None:
    import torch.distributed._functional_collectives as collectives

    group = dist.group.WORLD
    total = collectives.all_reduce(torch.full((3,), float(rank)), "sum", group)
    assert torch.equal(total.wait() if hasattr(total, "wait") else total, torch.full((3,), float(sum(range(world)))))
    whole = collectives.all_gather_tensor(torch.full((2,), float(rank)), 0, group)
    assert torch.equal(torch.as_tensor(whole), torch.arange(world).repeat_interleave(2).float())
    piece = collectives.reduce_scatter_tensor(torch.ones(2 * world), "avg", 0, group)
    assert torch.equal(torch.as_tensor(piece), torch.ones(2))
    exchanged = collectives.all_to_all_single(torch.full((world,), float(rank)), None, None, group)
    assert torch.equal(torch.as_tensor(exchanged), torch.arange(float(world)))


def test_functional_collectives(rank_pool, nodes):
    rank_pool(3, nodes=nodes).run(functional)


def misuse(rank: int, world: int) -> None:
    group = dist.group.WORLD
    expanded = torch.zeros(1).expand(4)
    window = torch.zeros(9).as_strided((3, 4), (1, 2))
    meta = torch.zeros(2, device="meta")
    backend = backend_of(group)
    wrong_root = dist.BroadcastOptions()
    wrong_root.rootRank = world
    calls = [
        (lambda: dist.all_reduce(expanded), r"share memory .*contiguous"),
        (lambda: dist.all_reduce(window), r"share memory"),
        (lambda: backend.allreduce([meta]), r"is on meta"),
        (
            lambda: backend.broadcast([torch.zeros(1), torch.zeros(1)], dist.BroadcastOptions()),
            r"expected one tensor .* got 2",
        ),
        (lambda: backend.broadcast([torch.zeros(1)], wrong_root), rf"root is {world} in a group of {world}"),
        (
            lambda: dist.all_gather_into_tensor(torch.zeros(2 * world + 1), torch.zeros(2)),
            rf"{2 * world + 1} elements.*needs {2 * world}",
        ),
        (lambda: dist.reduce_scatter_tensor(torch.zeros(2), torch.zeros(2 * world + 2)), rf"{2 * world + 2} elements"),
        (
            lambda: group.allgather([[torch.zeros(1)] * (world + 1)], [torch.zeros(1)]),
            rf"has {world + 1} tensors in a group of {world}",
        ),
        (
            lambda: dist.all_to_all_single(torch.zeros(world + 1), torch.zeros(world + 1)),
            r"divided equally.*split_sizes",
        ),
        (
            lambda: dist.all_to_all_single(torch.zeros(world), torch.zeros(world), [1] * world, [2] * world),
            rf"add up to {2 * world}, but dimension 0 of the input has {world}",
        ),
    ]
    for call, text in calls:
        with pytest.raises(ValueError, match=text):
            call()
    dist.barrier()


def test_misuse_raises_value_error_with_both_values(rank_pool, nodes):
    rank_pool(2, nodes=nodes).run(misuse)
