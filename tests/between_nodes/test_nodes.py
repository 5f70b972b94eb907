"""Ranks that share no memory, or only some of them: which of them count as one node, and what differs for the others.

Most tests of groups run over two nodes, too (the fixture ``nodes``); these are about nodes themselves.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ddp_cases import trained_parameters
from probes import backend_of, in_heap, total
from ranks import in_ranks, run_ranks


def shared_memory(rank: int, world: int) -> list[str]:
    """Return the inodes of the memory that this process shares with ranks of its node, after an all-reduce."""
    assert total() == world
    lines = Path("/proc/self/maps").read_text().splitlines()
    return sorted({line.split()[4] for line in lines if "/memfd:ours" in line})


def check_shared(found: list[list[str]], expected: str) -> None:
    """Check who shares memory: ranks of the same node have the same letter in ``expected``."""
    for one, mine in zip(found, expected, strict=True):
        assert bool(one) == (len(set(expected)) < len(expected))  # no memory is shared if each rank is a node
        for other, theirs in zip(found, expected, strict=True):
            assert (one == other) == (mine == theirs or not one)


@pytest.mark.parametrize("ids", ["aaa", "aab", "abc", "aba"])
def test_ranks_with_different_node_ids_share_no_memory(ids):
    environments = [{"OURS_NODE_ID": one} for one in ids]
    check_shared(run_ranks(3, shared_memory, env=environments), ids)


def as_users(rank: int, world: int, users: list[int]) -> list[str]:
    """Join as another user, with processes that this user may inspect."""
    os.setuid(users[rank])
    assert ctypes.CDLL(None).prctl(4, 1, 0, 0, 0) == 0  # PR_SET_DUMPABLE, which a change of user clears
    dist.init_process_group("ours")
    return shared_memory(rank, world)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become two other users")
@pytest.mark.parametrize("users", [[65533, 65533, 65533], [65533, 65534, 65533]])
def test_ranks_that_may_not_inspect_each_other_share_no_memory(users):
    check_shared(run_ranks(3, as_users, users, backend=None), "".join(chr(user) for user in users))


@in_ranks(4, nodes=2, fresh=True)
def test_subgroups_share_memory_if_two_of_their_ranks_do(rank: int, world: int) -> None:
    members = {(0, 1): True, (2, 3): True, (0, 2): False, (1, 2, 3): True}
    groups = [dist.new_group(list(ranks)) for ranks in members]
    for group, (ranks, share) in zip(groups, members.items(), strict=True):
        if rank in ranks:
            assert total(group, float(rank)) == sum(ranks)
            assert backend_of(group).supports_tensor_alloc(torch.device("cpu")) == share, ranks


# --- what differs for ranks of several nodes --------------------------------------------------------------------------


@in_ranks(2, fresh=True, nodes=2)
def test_groups_without_a_heap_allocate_ordinary_memory(rank: int, world: int) -> None:
    tensor = backend_of().allocate_tensor(100_000, dtype=torch.float32, device=torch.device("cpu"))
    assert not in_heap(tensor)
    dist.all_reduce(tensor.fill_(1))
    assert tensor[-1].item() == world


@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True}, {"bucket_cap_mb": 0.01}])
def test_training_gives_the_same_on_two_nodes_as_on_one(options):
    alone, apart = (run_ranks(4, trained_parameters, options, nodes=count) for count in (1, 2))
    for results in (alone, apart):
        for parameters in results[1:]:
            assert all(torch.equal(a, b) for a, b in zip(results[0], parameters, strict=True))
    for one, other in zip(alone[0], apart[0], strict=True):
        torch.testing.assert_close(one, other)  # nodes add up their own ranks first


def all_reduce_large(rank: int, world: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return this rank's input, and the sum over all ranks."""
    mine = torch.randn(300_001, generator=torch.Generator().manual_seed(rank))
    result = mine.clone()
    dist.all_reduce(result)
    return mine, result


@pytest.mark.parametrize(("dtype", "half_unit"), [("bfloat16", 2.0**-8), ("float16", 2.0**-11)])
@pytest.mark.parametrize("world", [2, 4])
def test_rounding_on_the_wire_stays_within_its_bound(world, dtype, half_unit):
    results = run_ranks(world, all_reduce_large, nodes=2, env={"OURS_WIRE_DTYPE": dtype})
    inputs = torch.stack([mine for mine, _ in results]).double()
    of_nodes = inputs.view(2, world // 2, -1).sum(1)
    exact = of_nodes.sum(0)
    bound = half_unit * (of_nodes.abs().sum(0) + exact.abs() * (1 + half_unit)) + 1e-5
    for _, result in results:
        assert torch.equal(result, results[0][1])
        errors = (result.double() - exact).abs()
        assert bool((errors <= bound).all())
        assert errors.max() > half_unit / 4, "nothing was rounded"


def join_many(rank: int, world: int) -> tuple[float, int]:
    """Return the seconds that joining takes, and the number of keys in the store when all ranks have joined."""
    # The store's server may look up its clients' names, which takes long if no name server answers.
    store, _, _ = next(dist.rendezvous("env://", rank, world))
    if store.add("connected", 1) == world:
        store.set("all connected", "")
    store.wait(["all connected"])
    start = time.monotonic()
    dist.init_process_group("ours", store=store, rank=rank, world_size=world)
    seconds = time.monotonic() - start
    for count in (1, 100_000):
        tensor = torch.ones(count)
        dist.all_reduce(tensor)
        assert tensor[-1].item() == world
    keys = store.num_keys()
    dist.barrier()
    return seconds, keys


@pytest.mark.parametrize("count", [1, 8])
def test_many_ranks_join_with_few_keys_for_each(count):
    results = run_ranks(32, join_many, backend=None, nodes=count)
    assert max(seconds for seconds, _ in results) < 20
    assert max(keys for _, keys in results) <= 8 * 32


def sockets() -> int:
    """Return the number of sockets that this process has."""
    count = 0
    for entry in os.scandir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the one that reads the folder
            count += os.readlink(entry.path).startswith("socket:")
    return count


@in_ranks(6, nodes=2, fresh=True, env={"OURS_TCP_STREAMS": "1"})
def test_a_rank_sends_to_one_rank_of_each_other_node(rank: int, world: int) -> None:
    total()
    before = sockets()
    for count in (1, 1000):
        inputs = [torch.full((count + to,), rank * world + to) for to in range(world)]
        outputs = [torch.empty(count + rank, dtype=torch.int64) for _ in range(world)]
        dist.all_to_all(outputs, inputs)
        assert all((output == sender * world + rank).all() for sender, output in enumerate(outputs))
        gathered = [torch.empty(count, dtype=torch.int64) for _ in range(world)] if rank == 4 else None
        dist.gather(torch.full((count,), rank), gathered, dst=4)
        assert gathered is None or [int(one[-1]) for one in gathered] == list(range(world))
    # One for control and one for data. If both ends connect at once, one of the attempts ends a little later.
    deadline = time.monotonic() + 10
    while sockets() > before + 2:
        assert time.monotonic() < deadline, (before, sockets())
        time.sleep(0.01)
    dist.barrier()
