"""Sends and receives that nobody waits for: what happens to them and to the group, over time and as ranks leave."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from probes import HAS_HOOKS, backend_of, failed_with, reached, total
from ranks import in_ranks

LIMIT = 0.2  # seconds: the timeout of transfers that are posted within limited()
LARGE = 3_000_000  # elements: more than a channel, or the system, buffers for a sender


@contextlib.contextmanager
def limited() -> Iterator[None]:
    """Give the timeout LIMIT to the transfers that are posted in this block, and 60 s to later ones."""
    backend_of().set_timeout(timedelta(seconds=LIMIT))
    yield
    backend_of().set_timeout(timedelta(seconds=60))


def in_all_ways(tensors: list[torch.Tensor]) -> list[Any]:
    """Receive one tensor a tag from rank 0, each in a way of its own. Return the Works."""
    irecv, any_source, batch, future, callback = tensors
    operation = dist.P2POp(dist.irecv, batch, 0, tag=2)
    works = [dist.irecv(irecv, 0, tag=0), dist.irecv(any_source, tag=1), *dist.batch_isend_irecv([operation])]
    works += [dist.irecv(future, 0, tag=3), dist.irecv(callback, 0, tag=4)]
    works[3].get_future()
    works[4].get_future().then(lambda future: future.value())
    return works


@in_ranks(2, "nodes")
def test_a_transfer_that_nobody_waits_for_never_times_out(rank: int, world: int) -> None:
    tensors = [torch.zeros(4) for _ in range(5)]
    with limited():
        works = in_all_ways(tensors) if rank == 1 else [dist.isend(torch.ones(LARGE), 1, tag=9)]
    time.sleep(2 * LIMIT)
    assert total() == world, "nobody waits for the transfers, so they must not fail the group"
    if rank == 0:
        for tag in range(5):
            dist.send(torch.full((4,), tag + 1.0), 1, tag=tag)
    else:
        dist.recv(large := torch.empty(LARGE), 0, tag=9)
        assert large.eq(1).all()
    for number, work in enumerate(works):
        assert reached(work.is_completed), number
        work.wait()
    assert rank == 0 or [tensor.tolist() for tensor in tensors] == [[tag + 1.0] * 4 for tag in range(5)]
    assert failed_with("SUCCESS")


@in_ranks(2, "nodes", fresh=True)
def test_the_timeout_of_a_receive_begins_with_the_wait(rank: int, world: int) -> None:
    store = dist.distributed_c10d._get_default_store()
    if rank == 1:
        store.wait(["rank 0 gave up"])
        return
    with limited():
        work = dist.irecv(torch.empty(1), 1)
    time.sleep(2 * LIMIT)
    began = time.monotonic()
    with pytest.raises(dist.DistBackendError, match=rf"recv from rank 1.*Timed out waiting {LIMIT * 1000:.0f}ms"):
        work.wait()
    assert time.monotonic() - began >= LIMIT
    assert not failed_with("SUCCESS")
    store.set("rank 0 gave up", "")


@pytest.mark.parametrize("batch", [False, True])
@in_ranks(2, "nodes")
def test_a_future_times_out_and_leaves_the_receive_alive(rank: int, world: int, batch: bool) -> None:
    if rank == 0:
        tensor = torch.zeros(1)
        with limited():
            if batch:
                [work] = dist.batch_isend_irecv([dist.P2POp(dist.irecv, tensor, 1)])
            else:
                work = dist.irecv(tensor, 1)
        future = work.get_future()
        with pytest.raises(dist.DistBackendError, match=r"recv from rank 1.*Timed out"):
            future.wait()
        assert not work.is_completed()
        assert failed_with("SUCCESS")
    assert total() == world
    if rank == 1:
        dist.send(torch.ones(1), 0)
    else:
        work.wait()
        assert tensor.item() == 1


# --- ranks that leave ------------------------------------------------------------------------------------------------


def ping_pong(rank: int, peer: int) -> None:
    """Send from the lower rank to the higher one and back."""
    for source in sorted((rank, peer)):
        tensor = torch.full((1,), float(rank))
        if source == rank:
            dist.send(tensor, peer, tag=5)
        else:
            dist.recv(tensor, peer, tag=5)
            assert tensor.item() == peer


@in_ranks(3, "nodes", fresh=True)
def test_a_rank_that_leaves_drops_its_unmatched_transfers(rank: int, world: int) -> None:
    store = dist.distributed_c10d._get_default_store()
    dist.barrier()
    if rank == 1:
        hooked: list[bool] = []
        if HAS_HOOKS:
            backend_of().register_abort_hook(1, lambda: hooked.append(True))
        kept = [dist.irecv(torch.zeros(1), 0), dist.irecv(torch.zeros(1)), dist.irecv(torch.zeros(1), 0).get_future()]
        kept.append(dist.isend(torch.ones(LARGE), 0))
        dist.destroy_process_group()
        del kept
        assert not hooked, "the program wanted the group to end, so no abort hook may run"
        store.set("rank 1 has left", "")
        return
    store.wait(["rank 1 has left"])
    ping_pong(rank, 2 - rank)
    time.sleep(0.2)  # long enough for several checks of the peers
    ping_pong(rank, 2 - rank)
    assert failed_with("SUCCESS")


@pytest.mark.parametrize("how", ["recv", "send"])
@in_ranks(3, "nodes", fresh=True)
def test_a_transfer_with_a_rank_that_has_left_fails_when_it_is_waited_for(rank: int, world: int, how: str) -> None:
    store = dist.distributed_c10d._get_default_store()
    # Ranks that have never exchanged a message may not be connected.
    if rank < 2:
        ping_pong(rank, 1 - rank)
    dist.barrier()
    if rank == 1:
        dist.destroy_process_group()
        store.set("rank 1 has left", "")
        return
    work = None
    if rank == 0:
        work = dist.isend(torch.ones(LARGE), 1) if how == "send" else dist.irecv(torch.zeros(1), 1)
    store.wait(["rank 1 has left"])
    time.sleep(0.2)  # long enough for several checks of the peers
    ping_pong(rank, 2 - rank)
    assert failed_with("SUCCESS")
    if work is not None:
        left = r"rank 1 .*left the group"
        with pytest.raises(dist.DistNetworkError, match=left):
            work.get_future().wait()
        assert failed_with("SUCCESS"), "a future fails alone"
        with pytest.raises(dist.DistNetworkError, match=left):
            work.wait()
        assert not failed_with("SUCCESS")
    store.set(f"{rank} is done", "")
    store.wait(["0 is done"])
