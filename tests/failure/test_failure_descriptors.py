"""Ranks that run out of descriptors: live peers count as alive, and both sides say why an operation fails."""

from __future__ import annotations

import os
import resource
import time

import pytest
import torch
import torch.distributed as dist
from probes import backend_of, forbid_calls
from ranks import run_ranks

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


def wait_for_a_slow_peer(rank: int, world: int) -> float:
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
        dist.all_reduce(tensor)
        return tensor[0].item()
    taken = use_up_descriptors()
    store.set("has no descriptors", "")
    try:
        dist.all_reduce(tensor)
    finally:
        for descriptor in taken:
            os.close(descriptor)
    return tensor[0].item()


def test_a_live_peer_does_not_count_as_dead_when_descriptors_run_out():
    assert run_ranks(2, wait_for_a_slow_peer, backend=None) == [2, 2]


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


def raise_the_limit(rank: int, world: int) -> int:
    """Connect to the other ranks when the soft limit leaves no descriptors. Return the limit afterwards."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = use_up_descriptors(hard)
    tensor = torch.ones(4)
    dist.all_reduce(tensor)
    assert tensor[0].item() == world
    for descriptor in taken:
        os.close(descriptor)
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def test_a_group_that_needs_more_descriptors_raises_the_soft_limit():
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert run_ranks(3, raise_the_limit, nodes=3) == [hard] * 3


def count_pidfds(rank: int, world: int) -> tuple[int, int]:
    def pidfds() -> int:
        return sum("pidfd" in os.readlink(f"/proc/self/fd/{name}") for name in live_descriptors())

    def live_descriptors() -> list[str]:
        return [name for name in os.listdir("/proc/self/fd") if os.path.lexists(f"/proc/self/fd/{name}")]

    before = pidfds()
    groups = [dist.new_group() for _ in range(5)]
    for group in groups:
        assert backend_of(group).failure() == ""
    return before, pidfds()


def test_groups_of_the_same_processes_share_their_pidfds():
    for before, after in run_ranks(3, count_pidfds):
        assert before == 2
        assert after == before
