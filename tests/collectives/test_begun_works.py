"""Short collectives begin on the caller's thread, and end where somebody comes for them, or without anybody."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from probes import failed_with, is_running, reached
from ranks import gloo_group, in_ranks, run_ranks

SHORT = 512


def store() -> dist.Store:
    return dist.distributed_c10d._get_default_store()


def ones(rank: int) -> torch.Tensor:
    return torch.full((SHORT,), rank + 1.0)


def total(world: int) -> float:
    return world * (world + 1) / 2


def short_calls(rank: int, world: int) -> dict[str, tuple[Callable[[], dist.Work], torch.Tensor, torch.Tensor]]:
    """Return functions that start collectives, their results, and what those should be in the end."""
    mine = torch.arange(4.0) + rank
    everything = torch.stack([torch.arange(4.0) + r for r in range(world)])
    parts = list(torch.stack([mine] * world))
    reduced, root_reduced, coalesced, sent = mine.clone(), mine.clone(), mine.clone(), mine.clone()
    strided = torch.stack([mine, mine], dim=1)[:, 0]
    gathered, by_list, to_root, scattered, exchanged, from_all = (torch.zeros(world, 4) for _ in range(6))
    on_root = rank == 1
    return {
        "all_reduce": (lambda: dist.all_reduce(reduced, async_op=True), reduced, everything.sum(0)),
        "all_reduce of every other element": (
            lambda: dist.all_reduce(strided, async_op=True),
            strided,
            everything.sum(0),
        ),
        "all_reduce_coalesced": (
            lambda: dist.all_reduce_coalesced([coalesced], async_op=True),
            coalesced,
            everything.sum(0),
        ),
        "reduce": (
            lambda: dist.reduce(root_reduced, 1, async_op=True),
            root_reduced,
            everything.sum(0) if on_root else mine,
        ),
        "broadcast": (lambda: dist.broadcast(sent, 1, async_op=True), sent, everything[1]),
        "all_gather_into_tensor": (
            lambda: dist.all_gather_into_tensor(gathered, mine, async_op=True),
            gathered,
            everything,
        ),
        "all_gather": (lambda: dist.all_gather(list(by_list), mine, async_op=True), by_list, everything),
        "gather": (
            lambda: dist.gather(mine, list(to_root) if on_root else None, 1, async_op=True),
            to_root,
            everything if on_root else to_root.clone(),
        ),
        "scatter": (
            lambda: dist.scatter(scattered[0], parts if on_root else None, 1, async_op=True),
            scattered[0],
            everything[1],
        ),
        "reduce_scatter_tensor": (
            lambda: dist.reduce_scatter_tensor(from_all[0], torch.stack(parts), async_op=True),
            from_all[0],
            everything.sum(0),
        ),
        "all_to_all_single": (
            lambda: dist.all_to_all_single(exchanged, torch.stack(parts), async_op=True),
            exchanged,
            everything,
        ),
        "barrier": (lambda: dist.barrier(async_op=True), mine, mine.clone()),
    }


@in_ranks(3)
def test_peers_do_not_wait_for_a_rank_that_comes_late_to_wait(rank: int, world: int) -> None:
    for late in range(world):
        for name, (start, result, expected) in short_calls(rank, world).items():
            work = start()
            if rank == late:
                store().wait([f"{name}: {late}, {other}" for other in range(world) if other != rank])
            work.wait()
            assert result.equal(expected), name
            if rank != late:
                store().set(f"{name}: {late}, {rank}", "")


@in_ranks(2)
def test_calls_of_several_operations_wait_for_all_of_them(rank: int, world: int) -> None:
    numbers, counts = ones(rank), torch.full((4,), rank + 1)
    dist.group.WORLD.allreduce_coalesced([numbers, counts]).wait()
    assert numbers.eq(total(world)).all()
    assert counts.eq(int(total(world))).all()
    tensors = [ones(rank), ones(rank) * 2]
    with dist._coalescing_manager(async_ops=True) as manager:
        for tensor in tensors:
            dist.all_reduce(tensor)
    manager.wait()
    for factor, tensor in enumerate(tensors, 1):
        assert tensor.eq(factor * total(world)).all()


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


@in_ranks(2)
def test_groups_may_be_used_in_any_order(rank: int, world: int) -> None:
    """Each rank begins in its own order, and waits in the opposite one."""
    groups = [dist.new_group() for _ in range(3)]
    for _ in range(20):
        tensors = [ones(rank) for _ in groups]
        pairs = list(zip(groups, tensors, strict=True))[:: 1 if rank == 0 else -1]
        for work in reversed([dist.all_reduce(x, async_op=True, group=group) for group, x in pairs]):
            work.wait()
        assert all(x.eq(total(world)).all() for x in tensors)


@in_ranks(2)
def test_a_hook_does_not_run_in_a_call_that_waits_for_nothing(rank: int, world: int) -> None:
    group = dist.new_group()
    threads: list[int] = []
    group._register_on_completion_hook(lambda _: threads.append(threading.get_native_id()))
    tensors = [ones(rank), ones(rank)]
    dist.all_reduce(tensors[0], async_op=True, group=group)
    dist.barrier()  # all have begun
    dist.all_reduce(tensors[1], async_op=True, group=group)
    assert reached(lambda: len(threads) == 2)
    assert threading.get_native_id() not in threads
    assert all(x.eq(total(world)).all() for x in tensors)


@in_ranks(2)
def test_the_time_until_somebody_comes_for_it_is_not_its_own(rank: int, world: int) -> None:
    durations = []
    for i in range(10):
        x = ones(rank)
        began = time.monotonic()
        work = dist.all_reduce(x, async_op=True)
        store().set(f"{i}: {rank}", "")
        store().wait([f"{i}: {other}" for other in range(world)])
        assert reached(lambda x=x: bool(x.eq(total(world)).all()))
        work.wait()
        durations.append(work._get_duration() / ((time.monotonic() - began) * 1e3))
    # Other programs may stop this one where it counts, but hardly ten times.
    assert 0 < min(durations) < 0.5


# --- failures --------------------------------------------------------------------------------------------------------


@in_ranks(2, fresh=True)
def test_a_rank_that_never_comes_is_named_at_the_timeout(rank: int, world: int) -> None:
    """To a rank that waits, and where nobody does."""
    gate = gloo_group()
    groups = [dist.new_group(timeout=timedelta(seconds=1)) for _ in range(2)]
    if rank == 0:
        start = time.monotonic()
        works = [dist.all_reduce(ones(rank), async_op=True, group=group) for group in groups]
        with pytest.raises(dist.DistBackendError, match="all_reduce") as error:
            works[0].wait()
        assert "rank 1 (host" in str(error.value)
        assert time.monotonic() - start > 0.9
        assert reached(lambda: failed_with("TIMEOUT", groups[1]))
        with pytest.raises(dist.DistBackendError, match=r"rank 1 \(host"):
            works[1].wait()
    dist.barrier(group=gate)


@in_ranks(2, fresh=True)
def test_ranks_that_begin_different_things_hear_of_it(rank: int, world: int) -> None:
    if rank == 0:
        call = dist.all_reduce(ones(rank), async_op=True)
    else:
        call = dist.all_reduce(torch.ones(SHORT + 1), async_op=True)
    with pytest.raises(dist.DistBackendError, match=r"512 x float32.*513 x float32"):
        call.wait()


@in_ranks(2, fresh=True)
def test_abort_ends_what_has_begun(rank: int, world: int) -> None:
    gate = gloo_group()
    if rank == 0:
        work = dist.all_reduce(ones(rank), async_op=True)
        dist.distributed_c10d._abort_process_group()
        with pytest.raises(dist.DistBackendError, match="abort"):
            work.wait()
    dist.barrier(group=gate)


def dies_after_it_has_begun(rank: int, world: int) -> bool:
    x = ones(rank)
    work = dist.all_reduce(x, async_op=True)
    store().set(f"begun: {rank}", str(os.getpid()))
    store().wait([f"begun: {other}" for other in range(world)])
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    assert reached(lambda: not is_running(int(store().get("begun: 1"))))
    work.wait()
    return bool(x.eq(total(world)).all())


def test_what_a_rank_began_before_it_died_counts():
    assert run_ranks(3, dies_after_it_has_begun, killed=[1])[::2] == [True, True]
