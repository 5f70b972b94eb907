"""Short collectives begin on the caller's thread, and end where somebody comes for them, or without anybody."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from probes import reached
from ranks import in_ranks

SHORT = 512


def ones(rank: int) -> torch.Tensor:
    return torch.full((SHORT,), rank + 1.0)


def total(world: int) -> float:
    return world * (world + 1) / 2


@in_ranks(3)
def test_peers_do_not_wait_for_a_rank_that_comes_late_to_wait(rank: int, world: int) -> None:
    store = dist.distributed_c10d._get_default_store()
    for late in range(world):
        x = ones(rank)
        work = dist.all_reduce(x, async_op=True)
        if rank == late:
            store.wait([f"begun: {late}, {other}" for other in range(world) if other != rank])
        work.wait()
        assert x.eq(total(world)).all()
        if rank != late:
            store.set(f"begun: {late}, {rank}", "")


@in_ranks(2)
def test_who_only_asks_finds_it_complete(rank: int, world: int) -> None:
    x = ones(rank)
    work = dist.all_reduce(x, async_op=True)
    assert reached(work.is_completed)
    assert x.eq(total(world)).all()
    assert work.is_success()
    work.wait()


@in_ranks(2)
def test_it_ends_if_nobody_comes(rank: int, world: int) -> None:
    """Again and again, so that a comm thread finds some of them on its rounds, and others when it has slept long."""
    for _ in range(3):
        x = ones(rank)
        dist.all_reduce(x, async_op=True)
        assert reached(lambda x=x: bool(x.eq(total(world)).all()))


@in_ranks(2)
def test_a_callback_runs_although_nobody_waits(rank: int, world: int) -> None:
    x, called = ones(rank), threading.Event()
    work = dist.all_reduce(x, async_op=True)
    work.get_future().then(lambda _: called.set())
    assert called.wait(30)
    assert x.eq(total(world)).all()


@pytest.mark.parametrize("backwards", [False, True])
@in_ranks(3)
def test_several_are_waited_for_in_any_order(rank: int, world: int, backwards: bool) -> None:
    for _ in range(20):
        tensors = [ones(rank), ones(rank) * 2, torch.full((1 << 17,), rank + 1.0), ones(rank) * 3]
        works = [dist.all_reduce(x, async_op=True) for x in tensors]
        for work in reversed(works) if backwards else works:
            work.wait()
        for x, factor in zip(tensors, (1, 2, 1, 3), strict=True):
            assert x.eq(factor * total(world)).all()


@in_ranks(2)
def test_what_comes_after_comes_after(rank: int, world: int) -> None:
    """A synchronous call, another kind of call, one that is long, and one from another thread."""
    for _ in range(20):
        x, y, long, z = ones(rank), ones(rank), torch.full((1 << 17,), rank + 1.0), ones(rank)
        first = dist.all_reduce(x, async_op=True)
        dist.all_reduce(y)
        assert x.eq(total(world)).all()
        assert y.eq(total(world)).all()
        dist.all_reduce(long, async_op=True).wait()
        dist.all_reduce(z, async_op=True)
        dist.barrier()
        assert z.eq(total(world)).all()
        first.wait()
        last = dist.all_reduce(x, async_op=True)
        thread = threading.Thread(target=last.wait)
        thread.start()
        last.wait()
        thread.join()
        assert x.eq(world * total(world)).all()


@in_ranks(2)
def test_a_wait_may_give_up_and_come_back(rank: int, world: int) -> None:
    x = ones(rank)
    gate = dist.new_group(backend="gloo")
    if rank == 0:
        work = dist.all_reduce(x, async_op=True)
        with pytest.raises(RuntimeError, match="timed out"):
            work.wait(timedelta(milliseconds=20))
        assert not work.is_completed()
        dist.barrier(group=gate)
    else:
        dist.barrier(group=gate)
        work = dist.all_reduce(x, async_op=True)
    assert work.wait(timedelta(seconds=30))
    assert x.eq(total(world)).all()


@in_ranks(2)
def test_a_group_may_end_with_what_all_have_begun(rank: int, world: int) -> None:
    group = dist.new_group()
    x = ones(rank)
    dist.all_reduce(x, async_op=True, group=group)
    dist.barrier()  # all have begun
    dist.destroy_process_group(group)
    assert x.eq(total(world)).all()
