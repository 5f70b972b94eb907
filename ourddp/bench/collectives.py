"""Times collectives of several peers, the backends and libraries that are compared, in turns and after a check."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from ourddp.bench import harness, report
from ourddp.bench.operations import OPERATIONS, Buffers, Operation

LEAST_ROUNDS, MOST_ROUNDS = 5, 300  # a median of fewer than 5 says little
# Calls of a loop. Short ones are many, because the scheduler takes a while to adapt after the peer before.
BURST_SMALL, BURST_LARGE = 20, 5
LARGE = 512 * 1024  # bytes

Case = tuple[str, int]  # the collective, and its size in bytes
CallOf = Callable[[str, Operation, Buffers, Any], Callable[[], object]]


def group_of(ranks: harness.Ranks, peer: str) -> Any:
    """Return a new group of a backend, or MPI's communicator, of all ranks."""
    if peer != "mpi":
        return ranks.group(peer)
    import mpi4py

    mpi4py.rc.thread_level = "funneled"  # one thread calls MPI; anything more would cost it locks
    from mpi4py import MPI

    return MPI.COMM_WORLD


def call_of(peer: str, operation: Operation, buffers: Buffers, group: Any) -> Callable[[], object]:
    """Return the peer's call of the collective; it ends when the result is there."""
    if peer == "mpi":
        return operation.mpi(buffers, group)
    call = operation.torch(buffers, group)
    if buffers.large.device.type != "cuda":
        return call

    def call_and_wait() -> None:
        call()
        torch.cuda.synchronize()

    return call_and_wait


def burst_of(size: int) -> int:
    """Return how many calls with `size` bytes make up a loop."""
    return BURST_LARGE if size >= LARGE else BURST_SMALL


def calls(
    operation: Operation, tensors: Mapping[str, Buffers], groups: Mapping[str, Any], call_of: CallOf
) -> dict[str, Callable[[], object]]:
    """Return each peer's call after it gave the right result once; a peer that lacks the collective is left out.

    Raises RuntimeError if a result is wrong on any rank.
    """
    found = {}
    for peer, group in groups.items():
        buffers = tensors[peer]
        operation.prepare(buffers)
        state, message = 0, ""
        try:
            call = call_of(peer, operation, buffers, group)
            call()
        except (RuntimeError, ValueError, NotImplementedError) as error:
            state, message = 1, f"{error}"
        if state == 0 and operation.is_wrong(buffers):
            state, message = 2, "its result is wrong"
        worst = torch.tensor([state])
        dist.all_reduce(worst, dist.ReduceOp.MAX)
        if message:
            print(f"{peer}, rank {buffers.rank}: {message.splitlines()[0]}", file=sys.stderr)
        if int(worst) == 2:
            raise RuntimeError(f"{peer} gave a wrong result, so it is not worth timing")
        if int(worst) == 0:
            found[peer] = call
    return found


def measure(
    ranks: harness.Ranks,
    groups: Mapping[str, Any],
    case: Case,
    buffers: Mapping[str, Buffers],
) -> dict[str, Any]:
    """Return the row of one case, whose calls are made in loops. Each peer has buffers of its own.

    What one does to its memory, such as moving it onto huge pages, must not help the others.
    """
    name, size = case
    operation = OPERATIONS[name]
    actions = calls(operation, buffers, groups, call_of)

    def refresh(peer: str) -> None:
        operation.prepare(buffers[peer])

    times = ranks.measure(
        actions,
        budget=ranks.plan["seconds_per_case"],
        least=LEAST_ROUNDS,
        most=MOST_ROUNDS,
        burst=burst_of(size),
        refresh=refresh if operation.changes_input else None,
    )
    scale = 0.5 if operation.half else 1.0
    return {
        "collective": name,
        "way": "loop",
        "size": size,
        "bytes": 4 * len(next(iter(buffers.values())).large) if size else 0,
        "rounds": max((len(column) for column in times.values()), default=0),
        "seconds": {peer: report.summary(column, scale) for peer, column in times.items()},
    }
