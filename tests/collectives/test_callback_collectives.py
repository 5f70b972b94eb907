"""Collectives that callbacks start: they match across ranks whatever thread runs a callback, and when."""

from __future__ import annotations

import datetime
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from callback_schedules import run_programs
from probes import backend_of, failed_with
from ranks import in_ranks, run_ranks

Future = torch.futures.Future

LIMIT = 20.0  # seconds after which a wait counts as hanging


class Held:
    """A new group whose collectives do not begin on the ranks that hold it until they let go."""

    def __init__(self, holds: bool, seconds: float = 60) -> None:
        self.group = dist.new_group(timeout=datetime.timedelta(seconds=seconds))
        self.let_go = threading.Event()
        if holds:
            self.group._register_on_completion_hook(lambda _: self.let_go.wait(LIMIT))
        dist.barrier(group=self.group, async_op=True)

    def all_reduce(self, value: float, size: int = 3) -> dist.Work:
        return dist.all_reduce(torch.full((size,), value), group=self.group, async_op=True)


def stages(rank: int, world: int, coalesced: bool) -> list[bool]:
    """On rank 0 all callbacks run when they are attached; on the other ranks only after all have been attached."""
    held = Held(holds=rank != 0)
    at_once = []

    def start(value: float) -> dist.Work:
        if not coalesced:
            return held.all_reduce(value)
        with dist._coalescing_manager(group=held.group, async_ops=True) as manager:
            dist.all_reduce(torch.full((3,), value), group=held.group)
        return manager.works[0] if hasattr(manager, "works") else manager

    def second(future: Future) -> torch.Tensor:
        at_once.append(threading.current_thread() is threading.main_thread())
        tensor = future.value()[0] * 10
        dist.all_reduce(tensor, group=held.group)
        return tensor

    def third(future: Future) -> torch.Tensor:
        at_once.append(threading.current_thread() is threading.main_thread())
        tensor = future.value() + 1
        return dist.all_reduce(tensor, group=held.group, async_op=True).get_future().wait()[0]

    results = []
    for i in range(4):
        work = start(10.0**i)
        if rank == 0:
            work.wait()
        results.append(work.get_future().then(second).then(third))
    held.let_go.set()
    for i, result in enumerate(results):
        expected = world * (world * 10 * world * 10.0**i + 1)
        assert result.wait().tolist() == [expected] * 3, (i, result.wait(), expected)
    dist.destroy_process_group(held.group)
    return at_once


@pytest.mark.parametrize("coalesced", [False, True])
def test_callbacks_that_run_at_once_match_those_that_run_later(nodes, rank_pool, coalesced):
    first, *others = rank_pool(2, nodes=nodes).run(stages, coalesced)
    assert first == [True] * 8
    assert others == [[False] * 8]


@in_ranks(2)
def test_callbacks_communicate_in_the_order_in_which_they_were_attached(rank: int, world: int) -> None:
    """Attach two callbacks to a future, of which the first is slow; on rank 0 both run when they are attached."""
    held = Held(holds=rank != 0)
    seen = []

    def call(future: Future, scale: float, slow: bool) -> None:
        if slow:
            time.sleep(0.05)  # so that the second callback could overtake
        tensor = torch.full((2,), scale)
        dist.all_reduce(tensor, group=held.group)
        seen.append(tensor[0].item())

    work = held.all_reduce(1.0)
    other = held.all_reduce(1.0)
    if rank == 0:
        work.wait()
        other.wait()
    results = [
        work.get_future().then(lambda f: call(f, 1.0, True)),
        work.get_future().then(lambda f: call(f, 2.0, False)),
        other.get_future().then(lambda f: call(f, 4.0, False)),
    ]
    held.let_go.set()
    for result in results:
        result.wait()
    assert seen == [world * 1.0, world * 2.0, world * 4.0]
    dist.destroy_process_group(held.group)


@in_ranks(2)
def test_a_chain_may_continue_after_another_callback_was_attached(rank: int, world: int) -> None:
    """The last callback would run where the first one ends, before its thread has come to the second."""
    held = Held(holds=True)
    seen = []

    def call(name: str) -> Callable[[Future], None]:
        def run(_: Future) -> None:
            tensor = torch.ones(1)
            dist.all_reduce(tensor, group=held.group)
            seen.append((name, tensor.item()))

        return run

    future = held.all_reduce(1.0).get_future()
    first = future.then(call("first"))
    future.add_done_callback(call("second"))
    first.add_done_callback(call("third"))
    held.let_go.set()
    dist.destroy_process_group(held.group)  # waits for the callbacks
    assert seen == [(name, world) for name in ("first", "second", "third")]


@in_ranks(4)
def test_callbacks_may_communicate_in_another_group(rank: int, world: int) -> None:
    """Callbacks on futures of pairs communicate across the pairs: a hierarchical average."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    columns = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    pair, column = pairs[rank // 2], columns[rank % 2]
    for _ in range(rank // 2):  # so that the pairs count their collectives differently
        dist.barrier(group=pair)

    def across(future: Future) -> torch.Tensor:
        tensor = future.value()[0]
        dist.all_reduce(tensor, group=column)
        return tensor

    results = []
    for i in range(3):
        work = dist.all_reduce(torch.full((2,), 10.0**i * (rank + 1)), group=pair, async_op=True)
        if (rank + i) % 2:
            work.wait()
        results.append(work.get_future().then(across))
    for i, result in enumerate(results):
        assert result.wait().tolist() == [10.0**i * 10] * 2
    # There is a callback on each of two groups; their collectives have the same number and use the same group.
    works = [dist.all_reduce(torch.full((1,), 1.0), group=group, async_op=True) for group in (None, column)]
    tensors = [torch.full((1,), 1.0), torch.full((1,), 10.0)]

    def average(which: int) -> None:
        work = works[which]
        work.wait()
        work.get_future().then(lambda _: dist.all_reduce(tensors[which], group=column)).wait()

    threads = [threading.Thread(target=average, args=(which,)) for which in ([0, 1] if rank < 2 else [1, 0])]
    for thread in threads:
        thread.start()
        thread.join(0.3)  # so that this thread could be first
    for thread in threads:
        thread.join(LIMIT)
    assert [tensor.item() for tensor in tensors] == [2.0, 20.0]
    for group in (pair, column):
        dist.destroy_process_group(group)


@pytest.mark.parametrize(("world", "nodes"), [(2, 1), (3, 1), (4, 1), (2, 2), (3, 3), (4, 2)])
def test_random_programs_of_callbacks(rank_pool, world, nodes):
    for checked in rank_pool(world, nodes=nodes).run(run_programs, list(range(world * 100, world * 100 + 10))):
        assert checked > 100


@in_ranks(2)
def test_the_end_of_a_group_waits_for_collectives_of_callbacks(rank: int, world: int) -> None:
    """A callback starts collectives for which only the end of the group waits."""
    held = Held(holds=True)
    tensors = [torch.full((2,), float(i)) for i in range(5)]

    def start(_: Future) -> None:
        for tensor in tensors:
            dist.all_reduce(tensor, group=held.group, async_op=True)

    held.all_reduce(1.0).get_future().add_done_callback(start)
    held.let_go.set()
    dist.destroy_process_group(held.group)
    assert [tensor[0].item() for tensor in tensors] == [world * float(i) for i in range(5)]


@in_ranks(2)
def test_collectives_of_a_callback_are_not_coalesced_by_another_thread(rank: int, world: int) -> None:
    """The main thread coalesces while a callback starts something else."""
    group = dist.new_group()
    started = threading.Event()
    mine = torch.ones(2)

    def start(future: Future) -> None:
        dist.all_reduce(mine, group=group)
        started.set()

    with dist._coalescing_manager(group=group, async_ops=True) as manager:
        tensor = torch.ones(3)
        dist.all_reduce(tensor, group=group)
        helper = threading.Thread(
            target=lambda: dist.all_reduce(torch.ones(1), group=None, async_op=True).get_future().then(start)
        )
        helper.start()
        helper.join()
        assert started.wait(LIMIT)
    manager.wait()
    assert (mine[0].item(), tensor[0].item()) == (world, world)
    dist.destroy_process_group(group)


# ---------------------------------------------------------------- failures


def failure_of(body: Callable[[], Any]) -> tuple[str, str, float]:
    """Return the type and the text of what ``body`` raises, and the seconds until then."""
    began = time.monotonic()
    try:
        body()
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - began
    raise AssertionError("nothing was raised")


def started_on_some(rank: int, world: int, before: int) -> tuple[str, str, float]:
    """Callbacks start ``before`` collectives on all ranks, and one more on all ranks but rank 1."""
    group = dist.new_group(timeout=datetime.timedelta(seconds=1))

    def call(_: Future) -> None:
        for i in range(before + (rank != 1)):
            dist.all_reduce(torch.ones(2 + i), group=group)

    work = dist.all_reduce(torch.ones(3), group=group, async_op=True)
    result = work.get_future().then(call)
    if rank == 1:
        result.wait()
        dist.distributed_c10d._get_default_store().wait(["the others failed"])
        return failure_of(lambda: dist.all_reduce(torch.ones(1), group=group))
    raised = failure_of(result.wait)
    assert not failed_with("SUCCESS", group)
    dist.distributed_c10d._get_default_store().set("the others failed", "")
    return raised


@pytest.mark.parametrize("before", [0, 2])
def test_a_collective_that_a_callback_does_not_start_is_named(nodes, before):
    name = f"all_reduce number {before + 1} of those that callbacks started (by a callback on number 1)"
    for _, text, seconds in run_ranks(2, started_on_some, before, nodes=nodes):
        assert name in text
        assert "rank 1" in text
        assert seconds < 6


@pytest.mark.parametrize("how", ["size", "other callback"])
@in_ranks(2, "nodes", fresh=True)
def test_different_collectives_of_callbacks_are_a_mismatch(rank: int, world: int, how: str) -> None:
    group = dist.new_group()

    def call(_: Future, on: int) -> None:
        if on == (1 + rank if how == "other callback" else 1):
            dist.all_reduce(torch.ones(2 + (rank if how == "size" else 0)), group=group)

    dist.all_reduce(torch.ones(1), group=group)
    works = [dist.all_reduce(torch.ones(3), group=group, async_op=True) for _ in range(3)]
    futures = [work.get_future().then(lambda f, i=i: call(f, i)) for i, work in enumerate(works)]
    _, text, seconds = failure_of(lambda: [future.wait() for future in futures])
    assert "ranks of one group called different collectives" in text
    assert "number 1 of those that callbacks started (by a callback on number 3)" in text
    assert how == "size" or "number 1 of those that callbacks started (by a callback on number 4)" in text
    assert seconds < 5


def lonely(rank: int, world: int, ready: bool, how: str) -> tuple[str, str, float] | None:
    """Rank 0's callback starts a collective; rank 1 dies, leaves or aborts instead. ``ready``: a lane is open."""
    group = dist.new_group()
    store = dist.distributed_c10d._get_default_store()
    if ready:
        dist.all_reduce(torch.ones(1), group=group, async_op=True).get_future().then(
            lambda _: dist.all_reduce(torch.ones(1), group=group)
        ).wait()
    work = dist.all_reduce(torch.ones(3), group=group, async_op=True)
    work.wait()
    if rank == 0:

        def call(_: Future) -> None:
            store.set("waiting", "")
            dist.all_reduce(torch.ones(2), group=group)

        return failure_of(work.get_future().then(call).wait)
    store.wait(["waiting"])
    if how == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "leaves":
        dist.destroy_process_group(group)
        return None
    backend_of(group).abort()
    return None


@pytest.mark.parametrize("ready", [False, True])
@pytest.mark.parametrize("how", ["dies", "leaves", "aborts"])
def test_a_callback_that_waits_for_a_peer_notices_its_end(nodes, ready, how):
    result = run_ranks(2, lonely, ready, how, nodes=nodes, killed=[1] if how == "dies" else [])[0]
    _, text, seconds = result
    assert "rank 1" in text
    assert {"dies": "died", "leaves": "left the group", "aborts": "abort"}[how] in text
    assert seconds < 4


@pytest.mark.parametrize("in_callback", [False, True])
@in_ranks(2, "nodes", fresh=True)
def test_a_failure_ends_the_whole_group(rank: int, world: int, in_callback: bool) -> None:
    """An error of the program's collectives also fails those of callbacks, and the other way round."""
    group = dist.new_group()
    dist.all_reduce(torch.ones(1), group=group, async_op=True).get_future().then(
        lambda _: dist.all_reduce(torch.ones(1), group=group)
    ).wait()
    fails = dist.all_reduce(torch.ones(1), group=group, async_op=True).get_future()

    def differ(_: Any = None) -> None:
        dist.all_reduce(torch.ones(2 + rank), group=group)

    first = failure_of(fails.then(differ).wait if in_callback else differ)
    again = [
        failure_of(lambda: dist.all_reduce(torch.ones(1), group=group)),
        failure_of(fails.then(lambda _: dist.all_reduce(torch.ones(1), group=group)).wait),
    ]
    for _, text, _ in (first, *again):
        assert "ranks of one group called different collectives" in text
