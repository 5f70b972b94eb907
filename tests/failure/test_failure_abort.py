"""Aborting a group ends every call that waits in it."""

from __future__ import annotations

import threading
import time

import pytest
import torch
import torch.distributed as dist
from patience import check_soon
from probes import backend_of, failed_with, reached, threads_named, waits_for_another_thread, waits_for_peers
from ranks import in_ranks, run_ranks


def aborted(rank: int, world: int, what: str) -> tuple[float, str]:
    gate = dist.new_group(backend="gloo")
    if rank == 1:
        dist.barrier(group=gate)
        return 0.0, ""
    waiter = threading.get_native_id()
    issued = threading.Event()
    waited: list[bool] = []
    aborted_at: list[float] = []

    def in_its_wait() -> bool:
        if what != "queued":
            return waits_for_peers(waiter)
        # Either the waiter runs what is queued, or a comm thread does and the waiter waits for that thread.
        return issued.is_set() and (
            waits_for_peers(waiter)
            or (any(map(waits_for_peers, threads_named("ours_comm"))) and waits_for_another_thread(waiter))
        )

    def abort() -> None:
        waited.append(reached(in_its_wait))
        aborted_at.append(time.monotonic())
        backend_of().abort()

    aborter = threading.Thread(target=abort)
    aborter.start()
    with pytest.raises(dist.DistBackendError, match="abort") as error:
        if what == "recv":
            dist.recv(torch.empty(1), 1)
        elif what == "queued":
            works = [dist.all_reduce(torch.ones(4), async_op=True) for _ in range(5)]
            issued.set()
            works[-1].wait()
        else:
            dist.all_reduce(torch.ones(4))
    ended_at = time.monotonic()
    aborter.join()
    assert waited == [True], "the call was never seen to wait, so this does not test the abort"
    assert failed_with("COMM_ERROR")
    dist.barrier(group=gate)
    return ended_at - aborted_at[0], str(error.value)


@pytest.mark.parametrize("what", ["all_reduce", "queued", "recv"])
def test_abort_frees_every_waiter_within_100_ms(what, nodes):
    def attempt() -> float:
        seconds, text = run_ranks(2, aborted, what, nodes=nodes)[0]
        assert seconds >= 0
        assert "rank 0" in text
        return seconds

    check_soon(0.1, attempt)


@in_ranks(2, "nodes", fresh=True)
def test_torch_can_abort_all_groups(rank: int, world: int) -> None:
    work = dist.all_reduce(torch.ones(4), async_op=True) if rank == 0 else None
    dist.distributed_c10d._abort_process_group()
    if work is not None:
        with pytest.raises(dist.DistBackendError):
            work.wait()
