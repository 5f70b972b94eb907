"""Arguments that are wrong on one rank alone: it may catch the ValueError and call again, in step with the others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist


def wrong_and_right(name: str, rank: int, world: int) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Two calls of the collective: one whose sizes for the rank's own part differ, and one that is correct."""
    ones = [torch.ones(3) for _ in range(world)]
    uneven = [torch.ones(2 if r == rank else 3) for r in range(world)]
    group = dist.group.WORLD
    assert group is not None
    calls: dict[str, Callable[[list[torch.Tensor]], Any]] = {
        "all_gather": lambda outputs: dist.all_gather(outputs, torch.ones(3)),
        "all_gather_coalesced": lambda outputs: group.allgather_coalesced(
            [[output] for output in outputs], [torch.ones(3)]
        ).wait(),
        "gather": lambda outputs: dist.gather(torch.ones(3), outputs if rank == 0 else None, dst=0),
        "scatter": lambda inputs: dist.scatter(torch.ones(3), inputs if rank == 0 else None, src=0),
        "all_to_all": lambda outputs: dist.all_to_all(outputs, ones),
        "all_to_all_single": lambda outputs: dist.all_to_all_single(
            torch.cat(outputs), torch.ones(3 * world), [o.numel() for o in outputs], [3] * world
        ),
        "reduce_scatter": lambda inputs: dist.reduce_scatter(torch.ones(3), inputs),
    }
    call = calls[name]
    return lambda: call(uneven), lambda: call(ones)


def wrong_once_on_the_root(rank: int, world: int, name: str) -> None:
    wrong, right = wrong_and_right(name, rank, world)
    if rank == 0:
        with pytest.raises(ValueError, match=r"rank 0 gives itself an input of [23] .* has [23]; .*same size"):
            wrong()
    right()  # its number must be the others'
    dist.barrier()


@pytest.mark.parametrize(
    "name",
    ["all_gather", "all_gather_coalesced", "gather", "scatter", "all_to_all", "all_to_all_single", "reduce_scatter"],
)
def test_a_rank_that_catches_its_own_mistake_stays_in_step(rank_pool, name, nodes):
    rank_pool(2, nodes=nodes).run(wrong_once_on_the_root, name)


def alone(rank: int, world: int) -> None:
    for name in ("all_gather", "gather", "scatter", "all_to_all", "all_to_all_single"):
        wrong, right = wrong_and_right(name, rank, world)
        with pytest.raises(ValueError, match="same size"):
            wrong()
        right()


def test_a_rank_alone_checks_the_same(rank_pool):
    rank_pool(1).run(alone)
