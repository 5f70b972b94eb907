"""Collectives of device tensors among the work of streams: who waits for whom, and who keeps what."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import device_type
import pytest
import torch
import torch.distributed as dist
from device_cases import here, stopped
from ranks import in_ranks

NCCL_BLOCKS = ["nccl, blocking", "nccl, compared before"]


def everywhere(*more: str) -> Callable[..., Any]:
    """Make a test of what ranks do, one alone and several, where the host carries out the calls and where NCCL does."""
    ways = [(1, "ipc"), (2, "ipc"), (2, "nccl"), *[(2, way) for way in more]]
    given = pytest.mark.parametrize(("world", "env"), ways, indirect=["env"])
    return lambda fn: given(in_ranks(None, "backend", "env")(fn))


def enqueued(fn: Callable[..., None]) -> Any:
    """Make a test of what only the engines do that take calls without the host: also that of a single rank."""
    given = pytest.mark.parametrize(("world", "env"), [(1, "ipc"), (2, "nccl")], indirect=["env"])
    return given(in_ranks(None, "backend", "env")(fn))


def copied(tensor: torch.Tensor, times: int = 1) -> torch.Tensor:
    """Return the sum of so many of ``tensor``; the stand-in too does that in its current stream."""
    total = torch.empty_like(tensor).copy_(tensor)
    for _ in range(times - 1):
        total.add_(tensor)
    return total


@everywhere()
def test_side_streams(rank: int, world: int, kind: str) -> None:
    """What one stream makes and another takes: the collective comes after the first and before the second."""
    device = here(kind)
    maker, taker = torch.Stream(device=device), torch.Stream(device=device)
    for _ in range(20):
        with maker:
            # Memory that was something else a moment ago.
            x = torch.full((5000,), -5.0, device=device)
            x.fill_(rank + 1.0)
            output = torch.full((5000 * world,), -6.0, device=device)
            work = dist.all_gather_into_tensor(output, x, async_op=True)
        with taker:
            work.wait()
            seen = torch.full((5000 * world,), -7.0, device=device)
            seen.copy_(output)
            host = seen.cpu()
        assert torch.equal(host, torch.arange(1.0, world + 1).repeat_interleave(5000))


@everywhere()
def test_tensors_may_go_at_once(rank: int, world: int, kind: str) -> None:
    """Who drops the tensors of a call right after it loses nothing: the Work keeps them while they are needed."""
    device = here(kind)
    kept = []
    with stopped(kind) as stop:
        for i in range(10):
            x = torch.full((20_000,), float(i), device=device)
            output = torch.full((20_000 * world,), -1.0, device=device)
            dist.all_gather_into_tensor(output, x, async_op=True)
            del x
            kept.append(output)
        stop.go_on()
    dist.barrier()
    for i, output in enumerate(kept):
        assert output.cpu().eq(i).all()


@enqueued
def test_waiting_blocks_streams_not_hosts(rank: int, world: int, kind: str) -> None:
    """Neither a call nor wait() waits on the host for what the device has yet to do, and all comes in order."""
    device = here(kind)
    x = torch.ones(1000, device=device)
    dist.all_reduce(x)  # the first one, for which the host waits
    for asynchronous in (False, True):
        x.fill_(0)
        torch.accelerator.synchronize()
        with stopped(kind) as stop:
            x.fill_(rank + 1)  # comes after the stop, and the collective after this
            work = dist.all_reduce(x, async_op=asynchronous)
            if asynchronous:
                assert work.wait()
                assert not work.is_completed()
                assert work.result()[0] is not None
                assert work.get_future().done()
            else:
                assert work is None
            x.add_(x)  # after the collective, since the current stream waits for it
            stop.go_on()
        assert torch.equal(x.cpu(), torch.full((1000,), float(world * (world + 1))))


@pytest.mark.parametrize("kind", [device_type.NAME], indirect=True)
@enqueued
def test_a_capture_takes_collectives(rank: int, world: int, kind: str) -> None:
    """What is captured is given to the device, and nobody on the host waits for it."""
    module = device_type.load()
    device = here(kind)
    x = torch.ones(4, device=device)
    dist.all_reduce(x)
    module.set_capturing(True)
    try:
        # The first call of the capture, with which the group's stream joins it.
        dropped = torch.ones(4, device=device)
        kept = weakref.ref(dropped)
        dist.all_reduce(dropped, async_op=True)
        del dropped
        assert kept() is not None  # or its memory could serve the rest of the graph
        dist.all_reduce(x)
        dist.all_gather([torch.empty_like(x) for _ in range(world)], x)
        work = dist.broadcast(x, 0, async_op=True)
        assert work.wait()
        assert work.is_completed()
        if rank == 0:  # which is no call that the others would miss
            with pytest.raises(ValueError, match="move them to one device"):
                dist.all_gather([torch.empty(4) for _ in range(world)], x)
        with pytest.raises(RuntimeError, match=r"barrier of tensors on .* cannot be captured"):
            dist.barrier()
    finally:
        module.set_capturing(False)
    dist.all_reduce(x)
    assert x.cpu().eq(world**3).all()


@everywhere()
def test_the_host_waits_if_there_is_a_timeout(rank: int, world: int, kind: str) -> None:
    """Calls return at once, and wait() when the operation has ended, or after its timeout."""
    device = here(kind)
    x = torch.ones(10, device=device)
    with stopped(kind) as stop:
        work = dist.all_reduce(x, async_op=True)
        with pytest.raises(RuntimeError, match="Operation timed out"):
            work.wait(timedelta(milliseconds=50))
        assert not work.is_completed()
        stop.go_on()
    assert work.wait(timedelta(seconds=30))
    assert work.is_completed()
    assert work.is_success()
    with torch.Stream(device=device):  # every stream sees the result
        assert x.cpu().eq(world).all()


@pytest.mark.parametrize("env", ["ipc", *NCCL_BLOCKS], indirect=True)
@in_ranks(2, "backend", "env")
def test_the_host_waits_without_a_timeout_where_an_option_says_so(rank: int, world: int, kind: str) -> None:
    device = here(kind)
    x = torch.ones(10, device=device)
    dist.all_reduce(x)
    with stopped(kind) as stop:
        threading.Timer(0.05, stop.go_on).start()
        work = dist.all_reduce(x, async_op=True)
        work.wait()
        assert work.is_completed()
    assert x.cpu().eq(world * world).all()


@everywhere(*NCCL_BLOCKS)
def test_futures_and_callbacks(rank: int, world: int, kind: str) -> None:
    """A future's value is there for the current stream of whoever waits, and for those of callbacks, which chain."""
    device = here(kind)

    def double(future: torch.futures.Future) -> torch.Tensor:
        return copied(future.value()[0], 2)

    def again(future: torch.futures.Future) -> torch.Tensor:
        (result,) = dist.all_reduce(copied(future.value()), async_op=True).get_future().wait()
        return result

    for _ in range(5):
        x = torch.full((3000,), rank + 1.0, device=device)
        with stopped(kind) as stop:
            work = dist.all_reduce(x, async_op=True)
            future = work.get_future().then(double).then(again)
            stop.go_on()
        expected = world * world * (world + 1.0)
        assert future.wait().cpu().eq(expected).all()
        assert work.get_future().value()[0].device == device
    work.wait(timedelta(seconds=30))
    assert 0 <= work._get_duration() < 60_000


@everywhere()
def test_callbacks_see_all_outputs(rank: int, world: int, kind: str) -> None:
    """So do those that come after them; also where outputs are strided, of several coalesced calls, or none."""
    device = here(kind)
    dist.all_reduce(torch.ones(1, device=device))

    def copy(future: torch.futures.Future) -> list[torch.Tensor]:
        value = future.value()
        return [copied(one) for one in (value[0] if value and isinstance(value[0], list) else value)]

    for strided in (False, True):
        x, y, z = (torch.full((500,), -5.0, device=device) for _ in range(3))
        wide = [torch.full((500, 2), -3.0, device=device) for _ in range(world)]
        outputs = [one[:, 1] if strided else torch.full((500,), -3.0, device=device) for one in wide]
        torch.accelerator.synchronize()
        with stopped(kind) as stop:
            for tensor, value in ((x, rank), (y, 1), (z, 2)):
                tensor.fill_(value)
            works = [dist.all_gather(outputs, x, async_op=True)]
            works.append(dist.gather(x, outputs if rank == 0 else None, dst=0, async_op=True))
            with dist._coalescing_manager(async_ops=True, device=device) as manager:
                dist.all_reduce(y)
                dist.all_reduce(z)
            futures = [work.get_future().then(copy) for work in (*works, *manager.works)]
            stop.go_on()
        gathered, at_the_root, sums = ([t.cpu().unique().tolist() for t in future.wait()] for future in futures)
        assert gathered == [[float(r)] for r in range(world)]
        assert at_the_root == (gathered if rank == 0 else [])
        assert sums == [[float(world)], [2.0 * world]]
        for one in wide if strided else []:
            assert one[:, 0].cpu().eq(-3).all()


@everywhere()
def test_barriers_wait_for_the_device(rank: int, world: int, kind: str) -> None:
    device = here(kind)
    x = torch.zeros(10, device=device)
    dist.all_reduce(x)
    come = threading.Event()  # set just before the device may come to the barrier
    seen = []
    with stopped(kind) as stop:
        work = dist.barrier(async_op=True)
        future = work.get_future().then(lambda _: seen.append(come.is_set()))
        with pytest.raises(RuntimeError, match="Operation timed out"):
            work.wait(timedelta(milliseconds=20))
        come.set()
        stop.go_on()
        work.wait()
        assert work.is_completed()
    future.wait()
    assert seen == [True]
    dist.barrier()
    dist.barrier(device_ids=[device.index])


@everywhere()
def test_misuse(rank: int, world: int, kind: str) -> None:
    """What cannot be is refused with a reason, on the rank that asks for it, and the group goes on."""
    device = here(kind)
    x = torch.ones(4, device=device)
    dist.all_reduce(x)
    with pytest.raises(ValueError, match=r"the tensors are on .*; move them to one device"):
        dist.all_gather([torch.empty(4) for _ in range(world)], x)
    if dist.group.WORLD._get_backend(device).device_engine().startswith("nccl"):
        with pytest.raises(ValueError, match="NCCL does not have SUM of int16"):
            dist.all_reduce(torch.ones(4, dtype=torch.int16, device=device), async_op=True).wait(timedelta(seconds=30))
    if kind == "cuda":  # the stand-in has no such tensors
        with pytest.raises(ValueError, match="sparse tensors are reduced on the cpu only"):
            dist.all_reduce(torch.eye(3).to_sparse().to(device))
    if torch.accelerator.device_count() > 1:
        other = torch.device(kind, (device.index + 1) % torch.accelerator.device_count())
        with pytest.raises(ValueError, match=f"works on {device} of this rank, but was given {other}"):
            dist.all_reduce(torch.ones(4, device=other))
    dist.all_reduce(x)
    assert x.cpu().eq(world * world).all()
