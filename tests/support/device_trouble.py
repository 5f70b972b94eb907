"""What the tests of messages and of failures do in each rank, on devices of any ``kind``: ``standin`` or ``cuda``."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import tempfile
import threading
import time
import weakref
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from device_cases import here, poisoned, stopped, values

# --- messages --------------------------------------------------------------------------------------------------------


def messages_around_a_ring(rank: int, world: int, kind: str) -> None:
    """Sends and receives in batches, of strided tensors too, and between devices and CPUs."""
    device = here(kind)
    after, before = (rank + 1) % world, (rank - 1) % world
    for shape in ((0,), (3,), (700, 90)):
        x = values(shape, torch.float32, rank).to(device)
        y = poisoned(x)
        wide = torch.stack([y, y], dim=-1)
        operations = [
            dist.P2POp(dist.isend, x, after, tag=1),
            dist.P2POp(dist.irecv, y, before, tag=1),
            dist.P2POp(dist.isend, x, after, tag=2),
            dist.P2POp(dist.irecv, wide[..., 1], before, tag=2),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        expected = values(shape, torch.float32, before)
        assert torch.equal(y.cpu(), expected)
        assert torch.equal(wide[..., 1].cpu(), expected)
    work = dist.isend(torch.full((5,), float(rank), device=device), after)
    host = torch.empty(5)
    dist.recv(host, before)
    work.wait()
    assert host.eq(before).all()


def messages_from_anyone(rank: int, world: int, kind: str) -> None:
    device = here(kind)
    if rank > 0:
        dist.send(torch.full((100,), float(rank), device=device), 0, tag=3)
        return
    seen = set()
    for _ in range(world - 1):
        x = poisoned(torch.empty(100, device=device))
        source = dist.recv(x, tag=3)
        assert x.cpu().eq(source).all()
        seen.add(source)
    assert seen == set(range(1, world))


def nobody_waits_for_a_receive(rank: int, world: int, kind: str) -> None:
    """The time of a receive runs from the wait, and a group may end with one that nobody answers."""
    device = here(kind)
    group = dist.new_group()
    backend = group._get_backend(device)
    x = poisoned(torch.empty(3, device=device))
    backend.set_timeout(timedelta(seconds=0.2))
    work = dist.irecv(x, 0, group=group) if rank == 1 else None
    backend.set_timeout(timedelta(seconds=60))
    time.sleep(0.5)
    dist.all_reduce(y := torch.ones(3, device=device), group=group)
    assert y.cpu().eq(world).all()
    if work is None:
        dist.send(y, 1, group=group)
        dist.barrier(group=group)
    else:
        dist.barrier(group=group)
        work.wait()
        assert x.cpu().eq(world).all()
        never = dist.irecv(x, 0, tag=9, group=group)
    dist.barrier(group=group)
    dist.destroy_process_group(group)
    if rank == 1:
        with pytest.raises(RuntimeError):
            never.wait(timedelta(seconds=30))


def no_message_holds_up_another(rank: int, world: int, kind: str) -> None:
    """A receive whose sender is late, or a send whose input is, waits alone; sends with one tag stay in order."""
    device = here(kind)
    peer = 1 - rank
    late, other = torch.empty(10, device=device), torch.empty(10, device=device)
    waiting = dist.irecv(late, peer, tag=1)
    stream = torch.Stream(device=device)
    with stream, stopped(kind) as stop:
        x = torch.full((10,), 1.0, device=device)
        held_up = dist.isend(x, peer, tag=1)
        with torch.Stream(device=device):
            behind = dist.isend(torch.full((10,), 2.0, device=device), peer, tag=1)
            dist.isend(torch.full((10,), 3.0, device=device), peer, tag=2)
            work = dist.irecv(other, peer, tag=2)
            assert work.wait(timedelta(seconds=30))
            assert other.cpu().eq(3).all()
            second = torch.empty(10, device=device)
            last = dist.irecv(second, peer, tag=1)
        assert not waiting.is_completed()
        assert not held_up.is_completed()
        assert not behind.is_completed()
        dist.all_reduce(torch.ones(1))  # the peer has seen that, too
        stop.go_on()
    for work in (waiting, held_up, behind, last):
        assert work.wait(timedelta(seconds=30))
    assert late.cpu().eq(1).all()
    assert second.cpu().eq(2).all()


def a_group_ends_after_its_messages(rank: int, world: int, kind: str) -> None:
    """A group may be destroyed when send() has returned, although the peer has yet to receive the message."""
    device = here(kind)
    group = dist.new_group()
    x = torch.full((1000,), float(rank + 1), device=device)
    y = poisoned(x)
    dist.barrier(group=group)
    with stopped(kind) as stop:
        if rank == 0:
            threading.Timer(0.2, stop.go_on).start()
            dist.send(x, 1, group=group)
        else:
            stop.go_on()
            dist.recv(y, 0, group=group)
        dist.destroy_process_group(group)
    if rank == 1:
        assert y.cpu().eq(1).all()


# --- failures --------------------------------------------------------------------------------------------------------


def raises_in_the_end(work: dist.Work, match: str) -> None:
    """The Work fails, in every wait, and no stream stays blocked."""
    with contextlib.suppress(RuntimeError):  # it may have failed by now
        work.wait()
    torch.accelerator.synchronize()
    with pytest.raises(RuntimeError, match=match):
        work.wait(timedelta(seconds=30))
    with pytest.raises(RuntimeError, match=match):
        work.wait()


def different_calls(rank: int, world: int, kind: str) -> None:
    device = here(kind)
    dist.all_reduce(torch.ones(4, device=device))
    work = dist.all_reduce(torch.ones(4 + rank, device=device), async_op=True)
    raises_in_the_end(work, "all_reduce")
    # Streams would wait for these, and never hear that there is no result.
    with pytest.raises(RuntimeError, match="all_reduce"):
        dist.all_reduce(torch.ones(4, device=device))
    with pytest.raises(RuntimeError, match="all_reduce"):
        dist.isend(torch.ones(4, device=device), 1 - rank)
    with pytest.raises(RuntimeError):
        dist.barrier()


def what_a_failure_keeps_goes_with_its_group(rank: int, world: int, kind: str) -> None:
    """The device may use the tensors of a collective that has failed: they are kept, but not for ever."""
    device = here(kind)
    group = dist.new_group()
    dist.all_reduce(torch.ones(4, device=device), group=group)
    x = torch.ones(4 + rank, device=device)
    kept = weakref.ref(x)
    work = dist.all_reduce(x, group=group, async_op=True)
    raises_in_the_end(work, "all_reduce")
    del work, x
    gc.collect()
    dist.destroy_process_group(group)
    del group
    gc.collect()
    until = time.monotonic() + 30  # threads of the group may be the last to own it
    while kept() is not None:
        assert time.monotonic() < until, "the tensor is still there"
        time.sleep(0.001)


def an_error_that_no_call_tells(rank: int, world: int, kind: str) -> None:
    """The operation failed after its wait() had returned, and then the group ended: this is told once."""
    device = here(kind)
    group = dist.new_group()
    dist.all_reduce(torch.ones(4, device=device), group=group)
    dist.all_reduce(torch.ones(4 + rank, device=device), group=group)
    before = os.dup(2)
    with tempfile.TemporaryFile("w+") as told:
        os.dup2(told.fileno(), 2)
        try:
            dist.destroy_process_group(group)
            del group
            gc.collect()
        finally:
            os.dup2(before, 2)
        told.seek(0)
        text = told.read()
    assert text.count("no call had reported") == 1, text
    assert "different collectives" in text


def calls_of_the_cpu_and_a_device(rank: int, world: int, kind: str) -> None:
    """One rank calls with a CPU tensor what the other calls with one of a device, before any of a device was."""
    device = here(kind)
    x = torch.ones(1000, device=device) if rank == 0 else torch.ones(1000)
    with pytest.raises(RuntimeError):
        dist.all_reduce(x, async_op=True).wait(timedelta(seconds=30))


def nobody_comes(rank: int, world: int, kind: str) -> None:
    device = here(kind)
    x = torch.ones(4, device=device)
    dist.all_reduce(x)
    if rank == 0:
        raises_in_the_end(dist.all_reduce(x, async_op=True), "Timed out waiting")
        assert x.cpu() is not None


def a_peer_dies(rank: int, world: int, kind: str) -> None:
    device = here(kind)
    x = torch.ones(4, device=device)
    dist.all_reduce(x)
    dist.barrier()
    if rank == world - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(RuntimeError, match=f"rank {world - 1}"):
        work = dist.all_reduce(x, async_op=True)  # which throws at once, if it is known already
        work.wait()
        torch.accelerator.synchronize()
        work.wait(timedelta(seconds=30))


def a_stream_is_stuck(rank: int, world: int, kind: str) -> None:
    """A device that never comes to a collective's place: time runs out, and abort() ends what is left."""
    device = here(kind)
    x = torch.ones(4, device=device)
    dist.all_reduce(x)
    with stopped(kind) as stop:
        works = [dist.all_reduce(x, async_op=True) for _ in range(3)]
        message = dist.isend(x, (rank + 1) % world) if world > 1 else None
        backend = dist.group.WORLD._get_backend(device)
        store = dist.distributed_c10d._get_default_store()
        store.set(f"rank {rank} has called", "")
        if rank == 0:
            store.wait([f"rank {other} has called" for other in range(world)])
            backend.abort()
        for work in works:
            with pytest.raises(RuntimeError, match="abort"):
                work.wait(timedelta(seconds=30))
        if message is not None:
            with pytest.raises(RuntimeError, match="abort"):
                message.wait(timedelta(seconds=30))
        stop.go_on()
    assert x.cpu() is not None


def the_work_before_takes_too_long(rank: int, world: int, kind: str) -> None:
    device = here(kind)
    x = torch.ones(4, device=device)
    dist.all_reduce(x)
    with stopped(kind) as stop:
        work = dist.all_reduce(x, async_op=True)
        with pytest.raises(RuntimeError, match="the work on the device that all_reduce comes after"):
            work.wait(timedelta(seconds=30))
        stop.go_on()
    assert x.cpu() is not None
