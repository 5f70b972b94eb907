"""Works: waiting, futures, callbacks, times, profiles, traces, timeouts, hooks."""

from __future__ import annotations

import json
import os
import threading
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from probes import HAS_HOOKS, HAS_WORK_EXCEPTION, backend_of
from ranks import in_ranks, run_ranks


def life_of_a_work(rank: int, world: int) -> None:
    tensor = torch.full((1000,), float(rank))
    work = dist.all_reduce(tensor, async_op=True)
    assert work.wait()
    assert work.is_completed()
    assert work.is_success()
    if HAS_WORK_EXCEPTION:
        assert work.exception() is None
    assert work.result()[0] is tensor or torch.equal(work.result()[0], tensor)
    assert 0 <= work._get_duration() < 60_000
    number = backend_of()._get_sequence_number_for_group()
    barrier = dist.barrier(async_op=True)
    assert backend_of()._get_sequence_number_for_group() == number + 1
    if HAS_HOOKS:  # from torch 2.15 on, groups and Works also report sequence numbers
        assert dist.group.WORLD._get_sequence_number_for_group() == number + 1
        assert (work._get_sequence_number(), barrier._get_sequence_number()) == (number, number + 1)

    future = dist.all_reduce(tensor, async_op=True).get_future()
    assert torch.equal(future.wait()[0], tensor)
    lists = [[torch.empty(2) for _ in range(world)]]
    work = dist.all_gather(lists[0], torch.full((2,), float(rank)), async_op=True)
    assert [int(t[0]) for t in work.get_future().wait()] == list(range(world))


@pytest.mark.parametrize("inline", ["1", "0"])
@pytest.mark.parametrize("world", [1, 2])
def test_life_of_a_work(rank_pool, world, inline, nodes):
    rank_pool(world, env={"OURS_INLINE": inline}, nodes=nodes).run(life_of_a_work)


@pytest.mark.parametrize("world", [1, 2, 4])
@in_ranks()
def test_callbacks_may_communicate(rank: int, world: int) -> None:
    """Callbacks run where the collective has ended, and may issue and await more collectives of the same group."""
    tensor = torch.full((4,), float(rank))
    total = float(sum(range(world)))

    def again(future: torch.futures.Future) -> torch.Tensor:
        (first,) = future.value()
        return dist.all_reduce(first.clone(), async_op=True).get_future().wait()[0]

    def synchronously(future: torch.futures.Future) -> torch.Tensor:
        second = future.value().clone()
        dist.all_reduce(second)
        return second

    future = dist.all_reduce(tensor, async_op=True).get_future().then(again).then(synchronously)
    assert torch.equal(future.wait(), torch.full((4,), total * world * world))

    def fail(_: torch.futures.Future) -> None:
        raise ValueError("from a callback")

    future = dist.all_reduce(tensor, async_op=True).get_future().then(fail)
    with pytest.raises(Exception, match="from a callback"):
        future.wait()
    dist.barrier()


@in_ranks(2)
def test_works_keep_their_tensors_alive(rank: int, world: int) -> None:
    for _ in range(50):
        dist.all_reduce(torch.ones(1000), async_op=True)  # nothing else keeps the tensor or the Work
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    assert tensor.item() == world


@in_ranks(2)
def test_a_wait_that_times_out_leaves_work_and_group_alive(rank: int, world: int) -> None:
    tensor = torch.full((2,), float(rank))
    gate = dist.new_group(backend="gloo")
    if rank == 0:
        work = dist.all_reduce(tensor, async_op=True)
        with pytest.raises(dist.DistBackendError, match=r"Operation timed out! .*all_reduce.*wait again"):
            work.wait(timedelta(milliseconds=60))
        assert not work.is_completed()
        dist.barrier(group=gate)
        work.wait()
    else:
        dist.barrier(group=gate)
        dist.all_reduce(tensor)
    assert tensor[0].item() == sum(range(world))


@pytest.mark.parametrize("world", [2, 3])
@in_ranks(fresh=True)
def test_groups_in_several_threads(rank: int, world: int) -> None:
    """Several threads each use a group, and Python stays responsive."""
    groups = [dist.new_group() for _ in range(3)]
    failures: list[BaseException] = []

    def loop(group: Any, asynchronous: bool) -> None:
        try:
            for i in range(60):
                tensor = torch.full((1 + 997 * (i % 3),), float(rank))
                work = dist.all_reduce(tensor, group=group, async_op=asynchronous)
                if asynchronous:
                    work.get_future().then(lambda future: future.value()[0].sum().item()).wait()
                assert tensor[0].item() == sum(range(world))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=loop, args=(g, i == 1)) for i, g in enumerate(groups)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert not failures, failures


# ---------------------------------------------------------------- profiles and traces


def profiled(rank: int, world: int) -> list[tuple[str, bool, Any]]:
    lists = [torch.empty(2, 3) for _ in range(world)]
    with torch.autograd.profiler.profile(record_shapes=True) as profile:
        dist.all_reduce(torch.ones(3, 4))
        dist.broadcast(torch.ones(2), 0)
        dist.all_gather(lists, torch.ones(2, 3))
        dist.barrier()
        if rank == 0:
            dist.send(torch.ones(5), 1)
        elif rank == 1:
            dist.recv(torch.ones(5), 0)
    return [(e.name, e.is_async, e.input_shapes) for e in profile.function_events if e.name.startswith("ours:")]


def test_profiles_show_each_operation_with_its_shapes(rank_pool):
    first, second = rank_pool(2).run(profiled)
    common = [
        ("ours:all_reduce", True, [[3, 4]]),
        ("ours:broadcast", True, [[2]]),
        ("ours:all_gather", True, [[2, 3]]),
        ("ours:barrier", True, []),
    ]
    assert sorted(first) == sorted([*common, ("ours:send", True, [[5]])])
    assert sorted(second) == sorted([*common, ("ours:recv", True, [[5]])])


@in_ranks(2)
def test_a_graph_may_wait_for_a_synchronous_call(rank: int, world: int) -> None:
    """Collectives that are issued in this context are registered with their Works, for which a compiled graph waits."""
    from torch.distributed import _functional_collectives as functional

    tensor = torch.ones(3)
    with functional.allow_inflight_collective_as_graph_input_ctx():
        dist.all_reduce(tensor)
    assert torch.equal(functional.wait_tensor(tensor), torch.full((3,), float(world)))


def traced(rank: int, world: int) -> list[dict[str, Any]]:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        dist.all_reduce(torch.ones(12))
    path = f"{os.environ['TRACE_FOLDER']}/{rank}.json"
    profile.export_chrome_trace(path)
    with open(path) as file:
        return [e["args"] for e in json.load(file)["traceEvents"] if e.get("name") == "record_param_comms"]


def test_traces_describe_a_call(tmp_path):
    (event,), _ = run_ranks(2, traced, env={"TRACE_FOLDER": str(tmp_path)})
    assert event["Collective name"] == "allreduce"
    assert event["In msg nelems"] == 12
    assert event["Group size"] == 2
    assert event["dtype"] == "Float"


# ---------------------------------------------------------------- timeouts


@pytest.mark.skipif(not HAS_HOOKS, reason="torch reports the timeout of a Work from 2.15 on")
@in_ranks(2, fresh=True)
def test_timeouts_of_the_call_the_group_and_ephemeral_ones(rank: int, world: int) -> None:
    group = dist.group.WORLD

    def seconds(options: dist.BarrierOptions | None = None) -> float:
        work = group.barrier(options) if options else dist.barrier(async_op=True)
        work.wait()
        return work.timeout.total_seconds()

    assert seconds() == 60
    group._add_ephemeral_timeout(timedelta(seconds=5))
    group._add_ephemeral_timeout(timedelta(seconds=2))
    assert (seconds(), seconds()) == (67, 60)
    group.set_timeout(timedelta(seconds=30))
    assert seconds() == 30
    options = dist.BarrierOptions()
    options.timeout = timedelta(seconds=9)
    assert seconds(options) == 9


# ---------------------------------------------------------------- hooks


@pytest.mark.parametrize("world", [1, 2])
@in_ranks(None, "nodes")
def test_on_completion_hook_sees_every_work(rank: int, world: int) -> None:
    group = dist.new_group()
    seen: list[tuple[str, int]] = []
    group._register_on_completion_hook(lambda info: seen.append((info.op_type.name, info.seq)))
    for _ in range(3):
        dist.all_reduce(torch.ones(2), group=group, async_op=True)
    dist.broadcast(torch.ones(2), 0, group=group)
    group._wait_for_pending_works()
    dist.destroy_process_group(group)
    assert seen == [("ALLREDUCE", 1), ("ALLREDUCE", 2), ("ALLREDUCE", 3), ("BROADCAST", 4)]


@pytest.mark.skipif(not HAS_HOOKS, reason="torch has abort hooks from 2.15 on")
@in_ranks(2, fresh=True)
def test_abort_hooks_run_before_the_error_is_raised(rank: int, world: int) -> None:
    calls: list[str] = []
    backend = backend_of()
    assert backend.supports_abort_hooks
    backend.register_abort_hook(1, lambda: calls.append("removed"))
    backend.register_abort_hook(2, lambda: calls.append(f"hook, {backend.get_error().name}"))
    backend.unregister_abort_hook(1)
    with pytest.raises(dist.DistBackendError):
        dist.all_reduce(torch.ones(2 + rank))
    calls.append("raised")
    with pytest.raises(dist.DistBackendError):
        dist.all_reduce(torch.ones(2))
    assert calls == ["hook, COMM_ERROR", "raised"]
