"""Invalid arguments: on one rank alone, of which the other ranks must hear, and on all ranks alike."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from invalid_calls import NAMES, calls_of, hear_of_an_invalid_call
from probes import backend_of, failed_with, reached, threads_named, total
from ranks import in_ranks

import ourddp


@pytest.mark.parametrize("used", [False, True])
@pytest.mark.parametrize("world", [2, 4])
@in_ranks(None, "nodes", fresh=True, timeout=120)
def test_all_ranks_hear_of_an_invalid_call_on_one_rank(rank: int, world: int, used: bool) -> None:
    for name in NAMES:
        hear_of_an_invalid_call(rank, world, name, used)
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
