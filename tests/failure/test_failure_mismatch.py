"""Ranks that make different calls get an error at once, and other groups go on."""

from __future__ import annotations

import re
import time

import pytest
import torch
import torch.distributed as dist
from patience import check_soon
from probes import failed_with, total

SHOWN = {
    "op": ["broadcast", "all_reduce"],
    "root": ["root 0", "root 1"],
    "count": ["5 x float32", "6 x float32"],
    "dtype": ["6 x int32", "6 x float32"],
    "reduce op": ["MAX", "SUM"],
    "size of a gathered tensor": ["24", "28"],
}


def mismatch(rank: int, world: int, kind: str) -> tuple[str, float, str]:
    group = dist.new_group()  # its failure must not fail another group
    dist.barrier(group=group)
    mine = rank == world - 1  # the last rank calls something else
    tensor = torch.ones(6, dtype=torch.int32 if mine and kind == "dtype" else torch.float32)
    start = time.monotonic()
    with pytest.raises(dist.DistBackendError) as error:
        if kind == "op":
            dist.broadcast(tensor, 0, group) if mine else dist.all_reduce(tensor, group=group)
        elif kind == "root":
            dist.broadcast(tensor, 1 if mine else 0, group)
        elif kind == "count":
            dist.all_reduce(tensor[: 5 if mine else 6], group=group)
        elif kind == "reduce op":
            dist.all_reduce(tensor, dist.ReduceOp.MAX if mine else dist.ReduceOp.SUM, group)
        elif kind == "size of a gathered tensor":
            count = 7 if mine else 6
            dist.all_gather([torch.empty(count) for _ in range(world)], torch.ones(count), group)
        else:
            dist.all_reduce(tensor, group=group)
    seconds = time.monotonic() - start
    if kind != "size of a gathered tensor":
        assert torch.equal(tensor, torch.ones_like(tensor)), "the input was written in spite of the error"
    with pytest.raises(dist.DistBackendError) as again:
        dist.barrier(group=group)
    assert failed_with("COMM_ERROR", group)
    dist.destroy_process_group(group)
    another = dist.new_group()
    assert total() == total(another) == world, "the failure concerns other groups as well"
    dist.destroy_process_group(another)
    return str(error.value), seconds, str(again.value)


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("kind", SHOWN)
def test_all_ranks_find_a_mismatch_at_once(rank_pool, world, kind, nodes):
    def attempt() -> float:
        results = rank_pool(world, nodes=nodes).run(mismatch, kind)
        for text, _, again in results:
            for word in SHOWN[kind]:
                assert word in text
            assert f"rank {world - 1}" in text
            assert len(set(re.findall(r"rank (\d+) \(host", text))) >= 2, "the ranks that differ are not named"
            assert nodes != 1 or "rank 0" in text, "within a node, all ranks are named"
            assert again == text, "the group does not stay failed with the same message"
        return max(seconds for _, seconds, _ in results)

    check_soon(1, attempt)
