"""Ranks that run out of descriptors: live peers count as alive, and both sides say why an operation fails."""

from __future__ import annotations

import os
import re
import resource
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from probes import backend_of, forbid_calls
from ranks import in_ranks, run_ranks

EMFILE = "Too many open files"


def use_up_descriptors(hard: int | None = None) -> list[int]:
    """Set a low soft limit and open descriptors until there are no more. Return them.

    The hard limit is as low, unless another one is given.
    """
    most = len(os.listdir("/proc/self/fd")) + 20
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard or most))
    taken: list[int] = []
    while True:
        try:
            taken.append(os.open(os.devnull, os.O_RDONLY))
        except OSError:
            return taken


@in_ranks(2, backend=None, fresh=True)
def test_a_live_peer_does_not_count_as_dead_when_descriptors_run_out(rank: int, world: int) -> None:
    if rank == 0:
        forbid_calls("pidfd_open")
    dist.init_process_group("ours")
    store = dist.distributed_c10d._get_default_store()
    dist.all_reduce(torch.ones(4))
    tensor = torch.ones(4)
    if rank == 1:
        # Long enough for rank 0 to check several times whether its peer lives.
        store.get("has no descriptors")
        time.sleep(0.3)
    taken = use_up_descriptors() if rank == 0 else []
    if rank == 0:
        store.set("has no descriptors", "")
    try:
        dist.all_reduce(tensor)
    finally:
        for descriptor in taken:
            os.close(descriptor)
    assert tensor[0].item() == 2


def first_contact(rank: int, world: int, poor: int) -> tuple[str, float]:
    """Return the error of a first collective in which rank ``poor`` has no descriptors left, and its seconds."""
    store = dist.distributed_c10d._get_default_store()
    taken = use_up_descriptors() if rank == poor else []
    if store.add("ready", 1) == world:
        store.set("go", "")
    store.get("go")
    start = time.monotonic()
    try:
        with pytest.raises(dist.DistBackendError) as error:
            dist.all_reduce(torch.ones(4))
        seconds = time.monotonic() - start
    finally:
        for descriptor in taken:
            os.close(descriptor)
    return str(error.value), seconds


@pytest.mark.parametrize("poor", [0, 1])
def test_all_ranks_name_a_rank_without_descriptors(poor):
    for text, seconds in run_ranks(2, first_contact, poor, nodes=2):
        assert f"rank {poor} (host" in text
        assert EMFILE in text
        assert "takes a rank up to 2 descriptors" in text
        assert "its limit is " in text
        assert seconds < 10


@in_ranks(3, nodes=3, fresh=True)
def test_a_group_that_needs_more_descriptors_raises_the_soft_limit(rank: int, world: int) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = use_up_descriptors(hard)
    tensor = torch.ones(4)
    dist.all_reduce(tensor)
    assert tensor[0].item() == world
    for descriptor in taken:
        os.close(descriptor)
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == hard


@in_ranks(3, fresh=True)
def test_groups_of_the_same_processes_share_their_pidfds(rank: int, world: int) -> None:
    def pidfds() -> int:
        paths = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
        return sum("pidfd" in os.readlink(path) for path in paths if os.path.lexists(path))

    assert pidfds() == 2
    groups = [dist.new_group() for _ in range(5)]
    assert not any(backend_of(group).failure() for group in groups)
    assert pidfds() == 2


LINUX = tuple(int(number) for number in re.findall(r"\d+", os.uname().release)[:2])


@pytest.mark.skipif(
    LINUX < (5, 14), reason="before Linux 5.14, memory can be reserved only by its file, which stays open"
)
@in_ranks(3, fresh=True)
def test_groups_of_a_node_take_no_descriptors(rank: int, world: int) -> None:
    def use(group: dist.ProcessGroup | None) -> list[torch.Tensor]:
        tensor = backend_of(group).allocate_tensor(300_000, dtype=torch.float32, device=torch.device("cpu")).fill_(1)
        for one in (tensor, torch.ones(4), torch.ones(300_000)):
            dist.all_reduce(one, group=group)
            dist.all_reduce(one, group=group, async_op=True).wait()
            assert one[0].item() == world * world
        after, before = (rank + 1) % world, (rank - 1) % world
        sent, received = dist.isend(tensor, after, group=group), torch.empty_like(tensor)
        dist.recv(received, before, group=group)
        sent.wait()
        return [tensor, received]

    kept = use(None)
    before = sorted(os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.exists())
    groups = [dist.new_group() for _ in range(10)]
    kept += [tensor for group in groups for tensor in use(group)]
    after = sorted(os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.exists())
    assert after == before


@in_ranks(2, nodes=2, fresh=True)
def test_groups_between_nodes_that_nobody_uses_take_no_descriptors(rank: int, world: int) -> None:
    dist.all_reduce(torch.ones(4))
    dist.new_group()  # the first one brings what all share
    before = len(os.listdir("/proc/self/fd"))
    groups = [dist.new_group() for _ in range(10)]
    # On a busy machine the last connections of the first group may come only now.
    assert len(os.listdir("/proc/self/fd")) < before + len(groups)
    tensor = torch.ones(4)
    dist.all_reduce(tensor, group=groups[-1])
    assert tensor[0].item() == world


@in_ranks(4, nodes=2, env={"OURS_IDLE_CONNECTIONS": "8"}, fresh=True)
def test_groups_between_nodes_close_idle_connections_beyond_the_limit(rank: int, world: int) -> None:
    def use(group: dist.ProcessGroup) -> None:
        for count in (4, 300_000):
            tensor = torch.full((count,), rank + 1.0)
            dist.all_reduce(tensor, group=group)
            assert tensor.eq(10).all()
        after, before = (rank + 1) % world, (rank - 1) % world
        sent, received = dist.isend(torch.full((4,), rank), after, group=group), torch.empty(4, dtype=torch.int64)
        dist.recv(received, before, group=group)
        assert received.eq(before).all()
        sent.wait()

    groups = [dist.new_group() for _ in range(24)]
    use(groups[0])
    one = len(os.listdir("/proc/self/fd"))
    most = one
    for _ in range(2):
        for group in groups:
            use(group)
            most = max(most, len(os.listdir("/proc/self/fd")))
    # A used group takes 8 on each rank here: two for control and two for data, and four by which its two parts wait. A
    # rank sees to the groups that it does not use now and then, so there may be those of some more groups.
    assert most < one + 8 * len(groups) // 2, f"{most - one} more than one group takes"
