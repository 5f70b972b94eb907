"""What goes wrong while a device works: every rank hears of it, and no stream stays blocked."""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import signal
import tempfile
import time
import weakref
from datetime import timedelta

import device_type
import pytest
import torch
import torch.distributed as dist
from device_cases import here, stopped
from patience import with_growing_timeouts
from programs import SUPPORT, run_programs
from ranks import in_ranks, run_ranks

IPC_AND_NCCL = pytest.mark.parametrize("env", ["ipc", "nccl"], indirect=True)
ON_THE_STAND_IN = pytest.mark.parametrize("kind", [device_type.NAME], indirect=True)


def raises_in_the_end(work: dist.Work, match: str) -> None:
    """The Work fails, in every wait, and no stream stays blocked."""
    with contextlib.suppress(RuntimeError):  # it may have failed by now
        work.wait()
    torch.accelerator.synchronize()
    with pytest.raises(RuntimeError, match=match):
        work.wait(timedelta(seconds=30))
    with pytest.raises(RuntimeError, match=match):
        work.wait()


@IPC_AND_NCCL
@in_ranks(2, "backend", "env", fresh=True)
def test_different_calls(rank: int, world: int, kind: str) -> None:
    """The group fails. The device may use its tensors: they are kept, but not for ever."""
    device = here(kind)
    group = dist.new_group()
    dist.all_reduce(torch.ones(4, device=device), group=group)
    x = torch.ones(4 + rank, device=device)
    kept = weakref.ref(x)
    work = dist.all_reduce(x, group=group, async_op=True)
    raises_in_the_end(work, "all_reduce")
    # Streams would wait for these, and never hear that there is no result.
    with pytest.raises(RuntimeError, match="all_reduce"):
        dist.all_reduce(torch.ones(4, device=device), group=group)
    with pytest.raises(RuntimeError, match="all_reduce"):
        dist.isend(torch.ones(4, device=device), 1 - rank, group=group)
    with pytest.raises(RuntimeError):
        dist.barrier(group=group)
    del work, x
    gc.collect()
    dist.destroy_process_group(group)
    del group
    gc.collect()
    until = time.monotonic() + 30  # threads of the group may be the last to own it
    while kept() is not None:
        assert time.monotonic() < until, "the tensor is still there"
        time.sleep(0.001)


@ON_THE_STAND_IN
@pytest.mark.parametrize("env", ["nccl"], indirect=True)
@in_ranks(2, "backend", "env", fresh=True)
def test_an_error_that_no_call_tells(rank: int, world: int, kind: str) -> None:
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


@IPC_AND_NCCL
@in_ranks(2, "backend", "env", fresh=True)
def test_calls_of_the_cpu_and_a_device(rank: int, world: int, kind: str) -> None:
    """One rank calls with a CPU tensor what the other calls with one of a device, before any of a device was."""
    device = here(kind)
    x = torch.ones(1000, device=device) if rank == 0 else torch.ones(1000)
    with pytest.raises(RuntimeError):
        dist.all_reduce(x, async_op=True).wait(timedelta(seconds=30))


@IPC_AND_NCCL
@in_ranks(2, "backend", "env", fresh=True)
def test_an_all_gather_of_the_cpu_is_not_taken_for_what_ranks_agree_on(rank: int, world: int, kind: str) -> None:
    """It has the size of the words by which the ranks of a device compare their calls."""
    x = torch.ones(9, dtype=torch.int64, device=here(kind))
    out = torch.empty(2 * 9, dtype=torch.int64, device=x.device)
    dist.all_gather_into_tensor(out, x)
    if rank == 0:
        x, out = x.cpu(), out.cpu()
    with pytest.raises(RuntimeError):
        dist.all_gather_into_tensor(out, x, async_op=True).wait(timedelta(seconds=30))


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


@pytest.mark.parametrize("world", [1, 2])
@IPC_AND_NCCL
@in_ranks(None, "backend", "env", fresh=True)
def test_abort_of_what_waits_for_a_stuck_stream(rank: int, world: int, kind: str) -> None:
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


def the_work_before_takes_too_long(rank: int, world: int, kind: str, sends: bool = False) -> None:
    device = here(kind)
    x = torch.ones(4, device=device)
    dist.all_reduce(x)
    with stopped(kind) as stop:
        work = dist.isend(x, 1 - rank) if sends else dist.all_reduce(x, async_op=True)
        with pytest.raises(
            RuntimeError, match=f"the work on the device that {'send' if sends else 'all_reduce'} comes"
        ):
            work.wait(*([] if sends else [timedelta(seconds=30)]))  # the time of a send runs from this
        stop.go_on()
    assert x.cpu() is not None


@pytest.mark.parametrize(
    ("case", "env"),
    [
        (nobody_comes, "ipc"),
        (nobody_comes, "nccl"),
        (the_work_before_takes_too_long, "ipc"),
        (functools.partial(the_work_before_takes_too_long, sends=True), "ipc"),
    ],
    indirect=["env"],
)
def test_timeouts(kind, backend, env, case):
    with_growing_timeouts(lambda timeout: run_ranks(2, case, kind, backend=backend, pg_timeout=timeout, env=env))


@pytest.mark.parametrize("env", ["ipc", "nccl", "staging"], indirect=True)
def test_a_killed_peer(kind, backend, env):
    run_ranks(3, a_peer_dies, kind, backend=backend, killed=[2], env=env)


@pytest.mark.parametrize("end", ["", "dist.destroy_process_group()"])
def test_a_program_may_end_with_collectives_under_way(kind, backend, end, tmp_path):
    code = f"""
        import sys
        sys.path.insert(0, {str(SUPPORT)!r})
        import device_cases, device_type, torch, torch.distributed as dist
        if {kind!r} == device_type.NAME:
            device_type.load()
        store = dist.FileStore({str(tmp_path / "store")!r}, 1)
        dist.init_process_group({backend!r}, rank=0, world_size=1, store=store)
        x = torch.ones(3, device={kind!r})
        dist.all_reduce(x)
        stop = device_cases.stop_stream({kind!r})
        work = dist.all_reduce(x, async_op=True)
        work.wait()
        if {bool(end)}:
            dist.group.WORLD._get_backend(torch.device({kind!r})).abort()
        {end}
        stop.go_on()
        print("ended")
    """
    (result,) = run_programs(code, [{}], whole_end=True)
    assert (result.returncode, result.stdout) == (0, "ended\n"), result.stderr
