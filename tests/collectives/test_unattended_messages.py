"""Messages that nobody waits for, and what those that somebody waits for cost the background thread."""

from __future__ import annotations

import re
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from probes import reached, threads_named
from ranks import in_ranks

SHORT = 512


def times_awake(name: str) -> int:
    """Return how often the threads of that name have gone to sleep."""
    switches = 0
    for thread in threads_named(name):
        status = Path(f"/proc/self/task/{thread}/status").read_text()
        switches += int(re.findall(r"^voluntary_ctxt_switches:\s*(\d+)", status, re.MULTILINE)[0])
    return switches


@pytest.mark.parametrize(("size", "period"), [(SHORT, 0.01), (1 << 17, 0.002)], ids=["short", "long"])
@in_ranks(2, "nodes", fresh=True)
def test_blocking_messages_wake_no_other_thread(rank: int, world: int, size: int, period: float) -> None:
    x = torch.ones(size)

    def pass_on(times: int) -> None:
        for turn in range(times):
            (dist.send if turn % 2 == rank else dist.recv)(x, 1 - rank)

    pass_on(10)
    before, start = times_awake("ours_messages"), time.monotonic()
    pass_on(2000)
    looks = (time.monotonic() - start) / period  # of a thread that goes round
    assert times_awake("ours_messages") - before < 200 + 2 * looks


@pytest.mark.parametrize("size", [SHORT, 1 << 20])
@in_ranks(2, "nodes")
def test_they_arrive_if_nobody_comes(rank: int, world: int, size: int) -> None:
    for _ in range(3):
        if rank == 0:
            dist.isend(torch.ones(size), 1)
        else:
            x = torch.zeros(size)
            dist.irecv(x, 0)
            assert reached(lambda x=x: bool(x.eq(1).all()))
        dist.barrier()


@in_ranks(2, "nodes")
def test_who_only_asks_finds_them_complete(rank: int, world: int) -> None:
    x = torch.full((SHORT,), float(rank))
    work = dist.isend(x, 1) if rank == 0 else dist.irecv(x, 0)
    assert reached(work.is_completed)
    assert x.eq(0).all()


@in_ranks(2, "nodes")
def test_a_callback_runs_although_nobody_waits(rank: int, world: int) -> None:
    x, called = torch.full((SHORT,), float(rank)), threading.Event()
    work = dist.isend(x, 1) if rank == 0 else dist.irecv(x, 0)
    work.get_future().then(lambda _: called.set())
    assert called.wait(30)
    assert x.eq(0).all()


@in_ranks(2, "nodes")
def test_a_wait_may_give_up_and_come_back(rank: int, world: int) -> None:
    x = torch.full((SHORT,), float(rank))
    if rank == 1:
        work = dist.irecv(x, 0)
        with pytest.raises(RuntimeError, match="timed out"):
            work.wait(timedelta(milliseconds=20))
        dist.barrier()
        assert work.wait(timedelta(seconds=30))
        assert x.eq(0).all()
    else:
        dist.barrier()
        dist.send(x, 1)


@in_ranks(2, "nodes")
def test_what_is_left_when_a_wait_ends_arrives_too(rank: int, world: int) -> None:
    tensors = [torch.full((SHORT,), float(rank)) for _ in range(2)]
    if rank == 0:
        dist.send(tensors[0], 1)
        dist.barrier()
        dist.send(tensors[1], 1)
    else:
        works = [dist.irecv(x, 0) for x in tensors]
        works[0].wait()
        dist.barrier()
        assert reached(lambda: bool(tensors[1].eq(0).all()))
