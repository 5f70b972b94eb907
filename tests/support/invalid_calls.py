"""Calls that are invalid on rank 0 alone, of which the other ranks must hear."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from probes import failed_with, total

import ourddp

Calls = tuple[Callable[[], Any], Callable[[], Any]]


def calls_of(group: Any, rank: int, world: int) -> dict[str, Calls]:
    """Two calls of each collective: one that is invalid on rank 0, and one that is correct."""
    ones = [torch.ones(3) for _ in range(world)]
    uneven = [torch.ones(2 if r == rank else 3) for r in range(world)]
    short = ones[:-1]
    whole, splits = torch.ones(3 * world), [3] * world

    def broadcast(root: int) -> Any:
        options = dist.BroadcastOptions()
        options.rootRank = root
        return group.broadcast([torch.ones(3)], options).wait()

    def all_reduce(op: Any) -> Any:
        return dist.all_reduce(torch.ones(3, dtype=torch.bool), op, group=group)

    def single(parts: list[int]) -> Any:
        return dist.all_to_all_single(torch.ones(3 * world), whole, parts, splits, group=group)

    def rooted(parts: list[torch.Tensor]) -> Any:
        return parts if rank == 0 else None

    return {
        "all_reduce": (lambda: all_reduce(dist.ReduceOp.AVG), lambda: all_reduce(dist.ReduceOp.MAX)),
        "broadcast": (lambda: broadcast(world), lambda: broadcast(0)),
        "all_gather": tuple(lambda p=p: dist.all_gather(p, torch.ones(3), group=group) for p in (short, ones)),
        "all_gather_coalesced": tuple(
            lambda p=p: group.allgather_coalesced([[part] for part in p], [torch.ones(3)]).wait()
            for p in (uneven, ones)
        ),
        "gather": tuple(lambda p=p: dist.gather(torch.ones(3), rooted(p), group=group) for p in (short, ones)),
        "scatter": tuple(lambda p=p: dist.scatter(torch.ones(3), rooted(p), group=group) for p in (uneven, ones)),
        "reduce_scatter": tuple(lambda p=p: dist.reduce_scatter(torch.ones(3), p, group=group) for p in (uneven, ones)),
        "all_to_all": tuple(lambda p=p: dist.all_to_all(p, ones, group=group) for p in (uneven, ones)),
        "all_to_all_single": tuple(lambda p=p: single(p) for p in ([2] * world, splits)),
        "all_gather_into_tensor": tuple(
            lambda n=n: dist.all_gather_into_tensor(torch.ones(n), torch.ones(3), group=group)
            for n in (3 * world + 1, 3 * world)
        ),
        "reduce_scatter_tensor": tuple(
            lambda n=n: dist.reduce_scatter_tensor(torch.ones(3), torch.ones(n), group=group)
            for n in (3 * world + 1, 3 * world)
        ),
    }  # type: ignore[return-value]


NAMES = list(calls_of(None, 0, 2))


def hear_of_an_invalid_call(rank: int, world: int, name: str, used: bool) -> None:
    """Make the call ``name``, which is invalid on rank 0, in a new group, which is ``used`` if it has made a call."""
    store = dist.distributed_c10d._get_default_store()
    # In a new group no ranks are connected; after an all-reduce all of them are.
    group = dist.new_group()
    if used:
        assert total(group) == world
    wrong, right = calls_of(group, rank, world)[name]
    name = f"{name} of {group.group_name}"
    if rank == 0:
        if used:
            # A rank that is still in the all-reduce could hear there that the next call has failed.
            store.wait([f"{name} comes on {r}" for r in range(1, world)])
        with pytest.raises(ourddp.MisuseError) as own:
            wrong()
        store.set(f"{name} was refused", str(own.value))
        # Rank 0 does nothing else that could help the other ranks.
        store.wait([f"{name} failed on {r}" for r in range(1, world)])
    else:
        store.set(f"{name} comes on {rank}", "")
        with pytest.raises(dist.DistBackendError) as error:
            right()
        text = str(error.value)
        assert store.get(f"{name} was refused").decode() in text
        assert f"number {2 if used else 1}" in text
        assert "rank 0 (host " in text
        store.set(f"{name} failed on {rank}", "")
    with pytest.raises(dist.DistBackendError, match=r"rank 0 \(host .*did not take part"):
        dist.barrier(group=group)
    assert not failed_with("SUCCESS", group)
    dist.destroy_process_group(group)
    assert total(dist.new_group()) == world, "the failure concerns other groups as well"
