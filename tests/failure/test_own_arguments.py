"""Invalid arguments: on one rank alone, of which the other ranks must hear, and on all ranks alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from probes import backend_of, failed_with, reached, threads_named, total
from ranks import in_ranks

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


@pytest.mark.parametrize("used", [False, True])
@pytest.mark.parametrize("world", [2, 4])
@in_ranks(None, "nodes", fresh=True, timeout=120)
def test_all_ranks_hear_of_an_invalid_call_on_one_rank(rank: int, world: int, used: bool) -> None:
    store = dist.distributed_c10d._get_default_store()
    for name in NAMES:
        # In a new group no ranks are connected; after an all-reduce all of them are.
        group = dist.new_group()
        if used:
            assert total(group) == world
        wrong, right = calls_of(group, rank, world)[name]
        if rank == 0:
            with pytest.raises(ourddp.MisuseError) as own:
                wrong()
            store.set(f"{name} was refused", str(own.value))
            # Rank 0 does nothing else that could help the other ranks.
            store.wait([f"{name} failed on {r}" for r in range(1, world)])
        else:
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
    assert total() == world


@pytest.mark.parametrize("world", [2, 4])
@in_ranks(None, "nodes", fresh=True)
def test_a_rank_may_go_on_after_its_invalid_call(rank: int, world: int) -> None:
    """Let rank 0 make its next call at once, in which the other ranks take no part."""
    wrong, right = calls_of(dist.group.WORLD, rank, world)["all_to_all"]
    if rank == 0:
        with pytest.raises(ValueError, match="make the sizes equal"):
            wrong()
    # Over TCP a rank may first see that another rank's call differs from its own.
    other = "" if backend_of().node_sizes() == [world] else "|called different"
    with pytest.raises(dist.DistBackendError, match=f"did not take part in all_to_all number 1{other}"):
        dist.barrier() if rank == 0 else right()


@in_ranks(2, "nodes", fresh=True)
def test_calls_before_an_invalid_one_succeed(rank: int, world: int) -> None:
    wrong, right = calls_of(dist.group.WORLD, rank, world)["scatter"]
    tensor = torch.ones(4)
    if rank == 0:
        work = dist.all_reduce(tensor, async_op=True)
        with pytest.raises(ValueError, match="make the sizes equal"):
            wrong()
        dist.distributed_c10d._get_default_store().set("refused", "")
    else:
        dist.distributed_c10d._get_default_store().wait(["refused"])
        work = dist.all_reduce(tensor, async_op=True)
        with pytest.raises(dist.DistBackendError, match="did not take part in scatter number 2"):
            right()
    work.wait()
    assert tensor.tolist() == [world] * 4


@pytest.mark.parametrize("world", [1, 2, 4])
@in_ranks(None, "nodes")
def test_an_invalid_call_on_all_ranks_leaves_the_group_usable(rank: int, world: int) -> None:
    for name in NAMES:
        if name in ("gather", "scatter"):
            continue
        wrong, right = calls_of(dist.group.WORLD, rank, world)[name]
        for _ in range(6):
            with pytest.raises(ourddp.MisuseError):
                wrong()
        right()
    assert failed_with("SUCCESS")
    assert reached(lambda: not threads_named("ours-refusal")), "a rank that makes calls needs no other thread"
    with pytest.raises(ourddp.MisuseError):
        wrong()
    assert backend_of().failure() == ""
