"""Sends and receives of device tensors."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import device_type
import pytest
import torch
import torch.distributed as dist
from device_cases import here, poisoned, stopped, values
from ranks import in_ranks

ON_THE_STAND_IN = pytest.mark.parametrize("kind", [device_type.NAME], indirect=True)


@in_ranks(3, "backend", "played_nodes")
def test_messages_around_a_ring(rank: int, world: int, kind: str) -> None:
    """Sends and receives in batches, of strided tensors too, from any source, and between devices and CPUs."""
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
    works = [dist.isend(torch.full((5,), float(rank), device=device), after, tag=tag) for tag in (3, 4)]
    host, anyones = torch.empty(5), poisoned(torch.empty(5, device=device))
    dist.recv(host, before, tag=3)
    assert dist.recv(anyones, tag=4) == before
    for work in works:
        work.wait()
    assert host.eq(before).all()
    assert anyones.cpu().eq(before).all()


@in_ranks(2, "backend", "played_nodes")
def test_nobody_waits_for_a_receive(rank: int, world: int, kind: str) -> None:
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


@in_ranks(2, "backend", "played_nodes")
def test_no_message_holds_up_another(rank: int, world: int, kind: str) -> None:
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


@pytest.mark.parametrize("waits", [False, True], ids=["future", "wait"])
@in_ranks(2, "backend", "played_nodes")
def test_a_send_behind_another_ends_in_time(rank: int, world: int, kind: str, waits: bool) -> None:
    """The time of a send runs while an earlier one to the same rank with the same tag waits for the device."""
    device = here(kind)
    group = dist.new_group()
    backend = group._get_backend(device)
    dist.barrier(group=group)
    if rank == 0:
        with torch.Stream(device=device), stopped(kind) as stop:
            first = dist.isend(torch.full((4,), 1.0, device=device), 1, group=group)
            with torch.Stream(device=device):
                backend.set_timeout(timedelta(seconds=0.2))
                second = dist.isend(torch.full((4,), 2.0, device=device), 1, group=group)
                backend.set_timeout(timedelta(seconds=60))
                with pytest.raises(RuntimeError, match="not done within 200 ms"):
                    second.wait() if waits else second.get_future().wait()
            assert second.is_completed() == waits
            if not waits:
                assert not first.is_completed()
            stop.go_on()
        for work in [] if waits else [first, second]:  # the group fails with the wait
            assert work.wait(timedelta(seconds=30))
    elif not waits:
        for sent in (1, 2):
            dist.recv(y := torch.zeros(4, device=device), 0, group=group)
            assert y.cpu().eq(sent).all()
    dist.barrier()
    dist.destroy_process_group(group)


@ON_THE_STAND_IN
@pytest.mark.parametrize("end", ["timeout", "abort", "destroy"])
@pytest.mark.parametrize("stuck", [0, 1], ids=["send", "recv"])
@in_ranks(2, "backend", "played_nodes")
def test_a_copy_that_hangs_ends_its_transfer(rank: int, world: int, kind: str, stuck: int, end: str) -> None:
    """Whoever waits for a transfer whose copy the device never does hears when its time is over, or its group ends."""
    device = here(kind)
    group = dist.new_group()
    backend = group._get_backend(device)
    x = torch.ones(4, device=device)
    dist.barrier(group=group)
    if rank != stuck:
        work = dist.isend(x, 1, group=group) if rank == 0 else dist.irecv(x, 0, group=group)
        dist.all_reduce(torch.ones(1))  # the other rank ends the group only after this call
        dist.barrier()
        dist.destroy_process_group(group)
        return
    copies = device_type.load().stop_copies()
    backend.set_timeout(timedelta(seconds=0.5 if end == "timeout" else 60))
    work = dist.isend(x, 1, group=group) if rank == 0 else dist.irecv(x, 0, group=group)
    errors = []

    def wait() -> None:
        try:
            work.wait()
        except RuntimeError as error:
            errors.append(str(error))

    until = time.monotonic() + 20
    while not copies.awaited():
        assert time.monotonic() < until, "there is no copy"
        time.sleep(0.001)
    dist.all_reduce(torch.ones(1))
    waiter = threading.Thread(target=wait, daemon=True)
    waiter.start()
    if end == "abort":
        backend.abort()
    elif end == "destroy":
        dist.destroy_process_group(group)
    waiter.join(20)
    ended = not waiter.is_alive()
    copies.go_on()
    dist.barrier()
    assert ended
    assert len(errors) == 1
    if end == "timeout":
        assert f"copy on the device for {('send', 'recv')[rank]} was not done within 500 ms" in errors[0]
    if end != "destroy":
        dist.destroy_process_group(group)


@in_ranks(2, "backend", "played_nodes")
def test_a_group_ends_after_its_messages(rank: int, world: int, kind: str) -> None:
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


def group_resources() -> int:
    """Return how many descriptors and mappings this process has of the kinds that groups keep for themselves alone."""
    links = []
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # one of another thread's may be gone by now
            links.append(os.readlink(path))
    return sum(link.startswith("anon_inode:") for link in links) + Path("/proc/self/maps").read_text().count("memfd:")


@pytest.mark.parametrize("watched", [False, True])
@in_ranks(2, "backend", "played_nodes", fresh=True)
def test_a_finished_work_keeps_nothing_of_its_group(rank: int, world: int, kind: str, watched: bool) -> None:
    device = here(kind)
    x = torch.ones(4, device=device)
    dist.barrier()
    # What the process keeps once the first of its groups was left belongs to no group.
    first = dist.new_group()
    dist.barrier(group=first)
    dist.destroy_process_group(first)
    before = group_resources()
    group = dist.new_group()
    work = dist.isend(x, 1, group=group) if rank == 0 else dist.irecv(x, 0, group=group)
    future = work.get_future().then(lambda _: None) if watched else None
    work.wait()
    if future is not None:
        future.wait()
    dist.barrier()
    assert group_resources() > before
    dist.destroy_process_group(group)
    del group
    gc.collect()
    until = time.monotonic() + 10  # threads of the group may be the last to own it
    while group_resources() > before:
        assert time.monotonic() < until, f"{group_resources()} descriptors and mappings instead of {before}"
        time.sleep(0.001)
    assert work.is_success()


@in_ranks(2, "backend", "played_nodes")
def test_a_future_that_waits_for_the_device_ends(rank: int, world: int, kind: str) -> None:
    """The future of a send ends with an error when its time is over, although nobody waits; the send goes on."""
    device = here(kind)
    group = dist.new_group()
    backend = group._get_backend(device)
    if rank == 0:
        with stopped(kind) as stop:
            backend.set_timeout(timedelta(seconds=0.2))
            work = dist.isend(torch.ones(4, device=device), 1, group=group)
            with pytest.raises(RuntimeError, match="work on the device that send comes after"):
                work.get_future().wait()
            backend.set_timeout(timedelta(seconds=60))
            assert not work.is_completed()
            stop.go_on()
        assert work.wait(timedelta(seconds=30))
    else:
        y = torch.zeros(4, device=device)
        dist.recv(y, 0, group=group)
        assert y.cpu().eq(1).all()
    dist.barrier(group=group)


@in_ranks(2, "backend", "played_nodes")
def test_callbacks_of_messages_may_wait_for_messages(rank: int, world: int, kind: str) -> None:
    """Those of a CPU's tensor for a device's, and the other way round."""
    device = here(kind)
    peer = 1 - rank
    late = {at: torch.zeros(4, device=at) for at in (device, torch.device("cpu"))}
    waits = {at: dist.irecv(x, peer, tag=5) for at, x in late.items()}
    results = {}

    def wait_for(at: torch.device) -> Callable[[torch.futures.Future], bool]:
        return lambda _: waits[at].wait(timedelta(seconds=30))

    for mine, others in zip(late, reversed(late), strict=True):
        x = torch.zeros(4, device=mine)
        results[mine] = dist.irecv(x, peer, tag=6).get_future().then(wait_for(others))
        dist.send(torch.ones(4, device=mine), peer, tag=6)
    for at in late:
        dist.send(torch.ones(4, device=at), peer, tag=5)
    assert all(result.wait() for result in results.values())
