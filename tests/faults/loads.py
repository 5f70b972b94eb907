"""What ranks do again and again while it is watched whether anything grows."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from checked_calls import run_async, run_movement, run_reduction
from collective_cases import ring_in_a_batch, single_calls, tags_in_any_order, uneven_sizes
from probes import backend_of, total
from torch import nn

from ourddp import DistributedDataParallel

Step = Callable[[int], None]  # takes the number of the step
Load = Callable[[int, int], Step]  # takes the rank and the number of ranks

TYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool]
SIZES = [1, 1000, 70_000]

_numbers = itertools.count(1)  # the same on all ranks, of what may be used once


def _in_turn(calls: list[Callable[[int], object]]) -> Step:
    """Make one of the calls in each step. Each gets the number of the turn, which is the same for all of them."""
    return lambda step: calls[step % len(calls)](step // len(calls))


def _objects(rank: int, world: int) -> None:
    everyone = [None] * world
    dist.all_gather_object(everyone, {"rank": rank})
    assert everyone == [{"rank": r} for r in range(world)]
    first = [rank, "from"]
    dist.broadcast_object_list(first, 0)
    assert first == [0, "from"]


def collectives(rank: int, world: int) -> Step:
    """All collectives in turn, with several types and sizes."""

    def kind(turn: int) -> tuple[torch.dtype, tuple[int]]:
        return TYPES[turn % len(TYPES)], (SIZES[turn % len(SIZES)],)

    def reduction(call: str, turn: int) -> None:
        dtype, shape = kind(turn)
        run_reduction(rank, world, call, dtype, ("MAX", "SUM")[turn % 2], shape, "contiguous", turn % 5)

    def movement(call: str, turn: int) -> None:
        run_movement(rank, world, call, *kind(turn), ("strided", "contiguous")[turn % 2], turn % 5)

    def bound(run: Callable[[str, int], None], call: str) -> Callable[[int], None]:
        return lambda turn: run(call, turn)

    return _in_turn(
        [
            *(bound(reduction, call) for call in ("all_reduce", "reduce", "reduce_scatter", "reduce_scatter_tensor")),
            *(bound(movement, call) for call in ("broadcast", "all_gather", "gather", "scatter", "all_to_all")),
            lambda turn: single_calls(rank, world),
            lambda turn: uneven_sizes(rank, world),
            lambda turn: _objects(rank, world),
            lambda turn: dist.barrier(),
            lambda turn: backend_of().monitored_barrier(timedelta(seconds=60)),  # torch 2.11 calls that of Gloo only
        ]
    )


def messages(rank: int, world: int) -> Step:
    """Messages around a ring, by tags, and from any rank."""

    def from_anyone(turn: int) -> None:
        if rank != 0:
            return dist.send(torch.full((SIZES[turn % len(SIZES)],), float(rank)), 0)
        received = torch.empty(SIZES[turn % len(SIZES)])
        assert {dist.recv(received) for _ in range(world - 1)} == {*range(1, world)}
        return None

    def to_the_next(turn: int) -> None:
        run_movement(rank, world, "send", TYPES[turn % len(TYPES)], (SIZES[turn % len(SIZES)],), "contiguous", 1)

    return _in_turn(
        [
            lambda turn: ring_in_a_batch(rank, world),
            lambda turn: tags_in_any_order(rank, world),
            lambda turn: dist.barrier(),  # what is from anyone must not be a later message
            from_anyone,
            lambda turn: dist.barrier(),
            to_the_next,
        ]
    )


def training(rank: int, world: int) -> Step:
    """Steps of DistributedDataParallel, with a new model after every 50."""

    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(8, 300), nn.Tanh(), nn.Linear(300, 300), nn.Tanh(), nn.Linear(300, 2))
        model = DistributedDataParallel(module, bucket_cap_mb=0.1)
        return model, torch.optim.SGD(model.parameters(), lr=0.01)

    model, optimizer = make()

    def step(number: int) -> None:
        nonlocal model, optimizer
        if number % 50 == 49:
            model, optimizer = make()
        optimizer.zero_grad()
        inputs = torch.full((4, 8), float(rank + number % 5))
        if number % 10 == 9:
            with model.no_sync():
                model(inputs).square().sum().backward()
        model(inputs).square().sum().backward()
        optimizer.step()

    return step


def callbacks(rank: int, world: int) -> Step:
    """Work that is not waited for, or whose future does something when it ends."""

    def step(number: int) -> None:
        run_async(rank, world, [("all_reduce", 1000), ("broadcast", 70_000), ("all_gather", 10)], [number, 3, 1])
        done: list[int] = []
        ends = []
        for index, size in enumerate(SIZES):
            work = dist.all_reduce(torch.ones(size), async_op=True)
            future = work.get_future()
            future.add_done_callback(lambda _, index=index: done.append(index))
            ends.append(future.then(lambda ended: ended.value()[0].sum().item()))
        dist.all_reduce(torch.ones(10), async_op=True)
        assert [end.wait() for end in ends] == [size * world for size in SIZES]
        dist.barrier()
        assert sorted(done) == [0, 1, 2]

    return step


def _forget_names() -> None:
    """Do what torch forgets: it keeps an empty list for the name of each group that was destroyed."""
    lists = dist.distributed_c10d._world.tags_to_pg
    for name in [name for name, groups in lists.items() if not groups]:
        del lists[name]


def groups(rank: int, world: int) -> Step:
    """A group that is made, used and destroyed; in every other step with one of two ranks inside."""

    def step(number: int) -> None:
        group = dist.new_group()
        assert total(group) == world
        if number % 2:
            pair = dist.new_group([0, 1])
            if rank < 2:
                dist.send(torch.ones(9), 1, pair) if rank == 0 else dist.recv(torch.ones(9), 0, pair)
                dist.destroy_process_group(pair)
        dist.destroy_process_group(group)
        _forget_names()

    return step


def failures(rank: int, world: int) -> Step:
    """A group that fails, since a rank calls something else or aborts, and is destroyed."""

    def step(number: int) -> None:
        group = dist.new_group(timeout=timedelta(seconds=30))
        assert total(group) == world
        try:
            if rank != number % world:
                dist.all_reduce(torch.ones(1000), group=group)
            elif number // world % 2:
                dist.all_reduce(torch.ones(1001), group=group)
            else:
                backend_of(group).abort()
                dist.all_reduce(torch.ones(1000), group=group)
            raise AssertionError("a group that should fail has not")
        except RuntimeError:
            dist.destroy_process_group(group)
        _forget_names()

    return step


def restarts(rank: int, world: int) -> Step:
    """The default group, which is destroyed and made again."""
    store = dist.distributed_c10d._get_default_store()
    hook = sys.excepthook

    def step(number: int) -> None:
        dist.barrier()
        dist.destroy_process_group()
        sys.excepthook = hook  # torch puts one more around it with each default group
        dist.init_process_group(
            "ours", store=dist.PrefixStore(f"restart {next(_numbers)}", store), rank=rank, world_size=world
        )
        assert total() == world

    return step


def changes_of_ranks(rank: int, world: int) -> Step:
    """The default group, whose ranks change their order by reconfigure()."""
    store = dist.distributed_c10d._get_default_store()

    def step(number: int) -> None:
        uuid = next(_numbers)
        store.set(f"change {uuid}/{rank}", dist.distributed_c10d._get_reconfigure_handle())
        handles = [store.get(f"change {uuid}/{r}").decode() for r in range(world)]
        if number % 2 == 0:
            handles.reverse()
        work = dist.distributed_c10d._reconfigure(uuid=uuid, handles=handles, timeout=timedelta(seconds=30))
        assert work.wait()
        assert total() == world

    return step


LOADS: dict[str, Load] = {
    "collectives": collectives,
    "messages": messages,
    "training": training,
    "callbacks": callbacks,
    "groups": groups,
    "failures": failures,
    "restarts": restarts,
}
if hasattr(dist.distributed_c10d, "_reconfigure"):  # from torch 2.15 on
    LOADS["changes of ranks"] = changes_of_ranks

# Those that make groups, of which each step takes longer.
MAKING_GROUPS = {"groups", "failures", "restarts", "changes of ranks"}
