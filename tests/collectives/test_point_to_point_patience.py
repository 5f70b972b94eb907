"""Sends and receives that nobody waits for: what happens to them and to the group, over time and as ranks leave."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
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


def posted_by(how: str, tensor: torch.Tensor, peer: int) -> Any:
    """Receive ``tensor`` in one of several ways, and return the Work."""
    if how == "batch":
        return dist.batch_isend_irecv([dist.P2POp(dist.irecv, tensor, peer)])[0]
    work = dist.irecv(tensor, peer if how != "any source" else None)
    if how == "future":
        work.get_future()
    if how == "callback":
        work.get_future().then(lambda future: future.value())
    return work


@pytest.mark.parametrize("how", ["irecv", "any source", "batch", "future", "callback"])
@in_ranks(2, "nodes")
def test_a_receive_that_nobody_waits_for_never_times_out(rank: int, world: int, how: str) -> None:
    tensor = torch.zeros(4)
    with limited():
        work = posted_by(how, tensor, 0) if rank == 1 else None
    time.sleep(2 * LIMIT)
    assert total() == world, "nobody waits for the receive, so it must not fail the group"
    if rank == 0:
        dist.send(torch.ones(4), 1)
    dist.barrier()
    if work is not None:
        assert reached(work.is_completed)
        work.wait()
        assert tensor.tolist() == [1.0] * 4
    assert failed_with("SUCCESS")


@in_ranks(2, "nodes")
def test_a_send_that_nobody_waits_for_never_times_out(rank: int, world: int) -> None:
    with limited():
        work = dist.isend(torch.ones(LARGE), 1) if rank == 0 else None
    time.sleep(2 * LIMIT)
    assert total() == world
    if work is None:
        dist.recv(tensor := torch.empty(LARGE), 0)
        assert tensor.eq(1).all()
    else:
        assert reached(work.is_completed)
        work.wait()


@in_ranks(2, "nodes", fresh=True)
def test_the_timeout_of_a_receive_begins_with_the_wait(rank: int, world: int) -> None:
    if rank == 1:
        reached(lambda: not failed_with("SUCCESS"))
        return
    with limited():
        work = dist.irecv(torch.empty(1), 1)
    time.sleep(2 * LIMIT)
    began = time.monotonic()
    with pytest.raises(dist.DistBackendError, match=rf"recv from rank 1.*Timed out waiting {LIMIT * 1000:.0f}ms"):
        work.wait()
    assert time.monotonic() - began >= LIMIT
    assert not failed_with("SUCCESS")


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

LEFTOVERS: dict[str, Callable[[], Any]] = {
    "a receive": lambda: dist.irecv(torch.zeros(1), 0),
    "a receive from any source": lambda: dist.irecv(torch.zeros(1)),
    "a future": lambda: dist.irecv(torch.zeros(1), 0).get_future(),
    "a send": lambda: dist.isend(torch.ones(LARGE), 0),
}


def ping_pong(rank: int, peer: int) -> None:
    """Send from the lower rank to the higher one and back."""
    for source in sorted((rank, peer)):
        tensor = torch.full((1,), float(rank))
        if source == rank:
            dist.send(tensor, peer, tag=5)
        else:
            dist.recv(tensor, peer, tag=5)
            assert tensor.item() == peer


@pytest.mark.parametrize("leftover", LEFTOVERS)
@in_ranks(3, "nodes", fresh=True)
def test_a_rank_that_leaves_drops_its_unmatched_transfers(rank: int, world: int, leftover: str) -> None:
    store = dist.distributed_c10d._get_default_store()
    dist.barrier()
    if rank == 1:
        hooked: list[bool] = []
        if HAS_HOOKS:
            backend_of().register_abort_hook(1, lambda: hooked.append(True))
        kept = LEFTOVERS[leftover]()
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


@pytest.mark.parametrize("how", ["recv", "send", "future"])
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
        with pytest.raises(dist.DistNetworkError, match=r"rank 1 .*left the group"):
            work.get_future().wait() if how == "future" else work.wait()
        assert failed_with("SUCCESS") == (how == "future")
    store.set(f"{rank} is done", "")
    store.wait(["0 is done"])
