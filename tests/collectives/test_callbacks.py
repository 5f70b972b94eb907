"""Callbacks on the futures of Works that wait for other operations, or issue them."""

from __future__ import annotations

import contextlib
import itertools
import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from probes import reached, threads_named
from ranks import in_ranks

from ourddp import _C

Future = torch.futures.Future

LIMIT = 20.0  # seconds after which a wait counts as hanging


@contextlib.contextmanager
def held_group() -> Iterator[Any]:
    """A new group whose collectives do not begin before the block ends, so that all are queued and have callbacks."""
    group = dist.new_group()
    go = threading.Event()
    group._register_on_completion_hook(lambda _: go.wait(LIMIT))
    dist.barrier(group=group, async_op=True)
    try:
        yield group
    finally:
        go.set()


def wait_for(future: Future) -> Any:
    """Wait for ``future`` with a limit, and return its value."""
    done = threading.Event()
    future.add_done_callback(lambda _: done.set())
    assert done.wait(LIMIT), "the future never completed"
    return future.value()


@pytest.mark.parametrize("world", [2, 3])
@in_ranks()
def test_a_callback_may_wait_for_a_collective_that_was_queued_later(rank: int, world: int) -> None:
    total = float(sum(range(world)))
    with held_group() as group:
        future = dist.all_reduce(torch.full((4,), float(rank)), group=group, async_op=True).get_future()
        other = dist.all_reduce(torch.full((3,), 10.0 * rank), group=group, async_op=True).get_future()
        result = future.then(lambda f: f.value()[0].sum().item() + other.wait()[0].sum().item())
    assert wait_for(result) == 4 * total + 30 * total
    dist.destroy_process_group(group)


@in_ranks(2)
def test_many_callbacks_that_wait_for_each_other_leave_few_threads(rank: int, world: int) -> None:
    """Callback i waits for collective i + 1, so that all callbacks run at the same time."""
    before = len(threads_named("ours_comm"))
    with held_group() as group:
        tensors = [torch.full((2,), float(i)) for i in range(31)]
        futures = [dist.all_reduce(t, group=group, async_op=True).get_future() for t in tensors]
        results = [
            mine.then(lambda f, other=following: f.value()[0][0].item() + other.wait()[0][0].item())
            for mine, following in itertools.pairwise(futures)
        ]
    for i, result in enumerate(results):
        assert wait_for(result) == world * (2 * i + 1)
    assert reached(lambda: len(threads_named("ours_comm")) <= before + 3), threads_named("ours_comm")
    dist.destroy_process_group(group)


def flights() -> list[tuple[str, int]]:
    """Return the group and the number of each collective in torch's FlightRecorder."""
    from torch._C._distributed_c10d import _dump_fr_trace_json

    entries = json.loads(_dump_fr_trace_json(backend="ours")).get("entries", [])
    return [(entry["process_group"][0], entry["collective_seq_id"]) for entry in entries]


@in_ranks(2)
def test_callbacks_issue_collectives_in_the_order_of_their_works(rank: int, world: int) -> None:
    """The first of two callbacks waits until the second could have issued a collective."""
    target = dist.new_group()
    order: list[str] = []
    values: dict[str, float] = {}

    def issue(name: str, value: float) -> None:
        tensor = torch.full((5,), value)
        work = dist.all_reduce(tensor, group=target, async_op=True)
        order.append(name)
        work.wait()
        values[name] = tensor[0].item()

    def in_first(_: Future) -> None:
        second.wait()
        # Enough time for the second callback to overtake, if the implementation lets it.
        reached(lambda: bool(order), 0.5)
        issue("first", 1.0)

    def in_second(_: Future) -> None:
        issue("second", 2.0)

    with held_group() as group:
        first = dist.all_reduce(torch.ones(1), group=group, async_op=True).get_future()
        second = dist.all_reduce(torch.ones(1), group=group, async_op=True).get_future()
        results = [first.then(in_first), second.then(in_second)]
    for result in results:
        wait_for(result)
    assert values == {"first": world * 1.0, "second": world * 2.0}
    if _C.records_flights():
        assert [number for name, number in flights() if name == f"{target.group_name}/callbacks"] == [1, 2]
    dist.destroy_process_group(target)
    dist.destroy_process_group(group)
    assert order == ["first", "second"]


@pytest.mark.parametrize("world", [2, 3])
@in_ranks()
def test_callbacks_that_communicate_do_not_nest(rank: int, world: int) -> None:
    """Every callback issues collectives and waits for them, while many others are queued."""
    depth = threading.local()
    deepest = 0

    def again(future: Future, i: int) -> float:
        nonlocal deepest
        depth.now = getattr(depth, "now", 0) + 1
        deepest = max(deepest, depth.now)
        tensor = future.value()[0] + i
        dist.all_reduce(tensor, group=group)
        dist.all_reduce(tensor, group=group, async_op=True).wait()
        tensor = dist.all_reduce(tensor, group=group, async_op=True).get_future().wait()[0]
        depth.now -= 1
        return tensor[0].item()

    results = []
    with held_group() as group:
        for i in range(40):
            future = dist.all_reduce(torch.full((2,), float(rank)), group=group, async_op=True).get_future()
            results.append(future.then(lambda f, i=i: again(f, i)))
    for i, result in enumerate(results):
        assert wait_for(result) == world**3 * (sum(range(world)) + i)
    assert deepest == 1
    dist.destroy_process_group(group)


# ---------------------------------------------------------------- transfers


@in_ranks(2, fresh=True)
def test_a_callback_of_a_transfer_may_wait_for_a_later_one(rank: int, world: int) -> None:
    """The second message is sent once the callback waits for it, and no thread waits for a Work."""
    store = dist.distributed_c10d._get_default_store()
    if rank == 1:
        dist.send(torch.full((3,), 1.0), 0, tag=1)
        store.wait(["the callback began"])
        dist.send(torch.full((3,), 2.0), 0, tag=2)
        return
    first = dist.irecv(torch.empty(3), 1, tag=1).get_future()
    second = dist.irecv(torch.empty(3), 1, tag=2).get_future()

    def sum_of_both(future: Future) -> float:
        store.set("the callback began", "")
        return future.value()[0].sum().item() + second.wait()[0].sum().item()

    assert wait_for(first.then(sum_of_both)) == 9
