"""Every collective that Gloo has as well, compared with Gloo."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from collective_model import OPS
from ranks import gloo_group
from torch.testing import assert_close

WORLDS = [1, 2, 3, 4, 7]


def every_call(group: dist.ProcessGroup | None, rank: int, world: int) -> dict[str, Any]:
    """Run every collective that Gloo has as well, and return the results."""
    out: dict[str, Any] = {}
    mine = torch.arange(6, dtype=torch.float32).view(2, 3) + 10 * rank

    for root in range(world):
        tensor = mine.clone()
        dist.broadcast(tensor, group_src=root, group=group)
        out[f"broadcast from {root}"] = tensor
        tensor = mine.clone()
        dist.reduce(tensor, group_dst=root, group=group)
        out[f"reduce to {root}"] = tensor if rank == root else None
        gathered = [torch.empty_like(mine) for _ in range(world)] if rank == root else None
        dist.gather(mine, gathered, group_dst=root, group=group)
        out[f"gather to {root}"] = gathered
        parts = [mine + r for r in range(world)] if rank == root else None
        tensor = torch.empty_like(mine)
        dist.scatter(tensor, parts, group_src=root, group=group)
        out[f"scatter from {root}"] = tensor

    for name in ("SUM", "PRODUCT", "MIN", "MAX"):
        tensor = mine.clone()
        dist.all_reduce(tensor, OPS[name], group=group)
        out[f"all_reduce {name}"] = tensor
    for name in ("BAND", "BOR", "BXOR"):
        tensor = mine.long()
        dist.all_reduce(tensor, OPS[name], group=group)
        out[f"all_reduce {name}"] = tensor

    gathered = [torch.empty_like(mine) for _ in range(world)]
    dist.all_gather(gathered, mine, group=group)
    out["all_gather"] = gathered
    whole = torch.empty(2 * world, 3)
    dist.all_gather_into_tensor(whole, mine, group=group)
    out["all_gather_into_tensor"] = whole
    piece = torch.empty_like(mine)
    dist.reduce_scatter(piece, [mine * (r + 1) for r in range(world)], group=group)
    out["reduce_scatter"] = piece
    piece = torch.empty(2, 3)
    dist.reduce_scatter_tensor(piece, torch.cat([mine * (r + 1) for r in range(world)]), group=group)
    out["reduce_scatter_tensor"] = piece

    exchanged = torch.empty(world, 2)
    dist.all_to_all_single(exchanged, torch.arange(2.0 * world).view(world, 2) + 100 * rank, group=group)
    out["all_to_all_single"] = exchanged
    total = sum(s + 1 for s in range(world))
    uneven = torch.empty((rank + 1) * world, 2)
    dist.all_to_all_single(
        uneven,
        torch.arange(2.0 * total).view(total, 2) + 100 * rank,
        output_split_sizes=[rank + 1] * world,
        input_split_sizes=[d + 1 for d in range(world)],
        group=group,
    )
    out["all_to_all_single, uneven"] = uneven

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the coalesced calls are deprecated, but have to work
        tensors = [mine.clone(), torch.full((4,), float(rank))]
        dist.all_reduce_coalesced(tensors, group=group)
        out["all_reduce_coalesced"] = tensors
        lists = [[torch.empty_like(mine), torch.empty(1)] for _ in range(world)]
        dist.all_gather_coalesced(lists, [mine, torch.tensor([float(rank)])], group=group)
        out["all_gather_coalesced"] = lists

    sparse = torch.sparse_coo_tensor([[0, rank % 3, 0]], [1.0, 2.0, 3.0], (4,), check_invariants=True)
    dist.all_reduce(sparse, group=group)
    out["all_reduce of a sparse tensor"] = sparse.to_dense()

    objects: list[Any] = [None] * world
    dist.all_gather_object(objects, {"rank": rank, "text": "x" * rank}, group=group)
    out["all_gather_object"] = objects
    shared = [rank, "from", 0] if rank == 0 else [None, None, None]
    dist.broadcast_object_list(shared, group_src=0, group=group)
    out["broadcast_object_list"] = shared
    dist.barrier(group=group)
    return out


def compare_every_call(rank: int, world: int) -> int:
    ours = every_call(None, rank, world)
    gloo = every_call(gloo_group(), rank, world)
    assert ours.keys() == gloo.keys()
    for name, expected in gloo.items():
        if isinstance(expected, torch.Tensor):
            assert_close(ours[name], expected, msg=lambda text, name=name: f"{name}: {text}")
        else:
            compare_nested(name, ours[name], expected)
    return len(ours)


def compare_nested(name: str, got: Any, expected: Any) -> None:
    if isinstance(expected, torch.Tensor):
        assert torch.equal(got, expected), f"{name}: {got} instead of {expected}"
    elif isinstance(expected, list):
        assert len(got) == len(expected)
        for one, other in zip(got, expected, strict=True):
            compare_nested(name, one, other)
    else:
        assert got == expected, name


@pytest.mark.parametrize("world", WORLDS)
def test_every_call_gives_what_gloo_gives(rank_pool, world, nodes):
    assert min(rank_pool(world, nodes=nodes).run(compare_every_call)) > 20
