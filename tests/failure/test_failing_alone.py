"""Errors that a rank meets alone, or between the operations of a collective: all ranks must hear of them."""

from __future__ import annotations

import ctypes
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from probes import HAS_HOOKS, backend_of
from ranks import in_ranks


@pytest.mark.parametrize("world", [2, 3])
@in_ranks(None, "nodes", fresh=True)
def test_sparse_tensors_of_different_shapes_fail_the_group_on_all_ranks(rank: int, world: int) -> None:
    indices, size = torch.tensor([[0], [1]]), (3, 4 if rank == world - 1 else 5)
    tensor = torch.sparse_coo_tensor(indices, torch.ones(1), size, check_invariants=True)
    with pytest.raises(dist.DistBackendError, match=rf"rank 0 has \(3, 5\).*rank {world - 1} has \(3, 4\)") as error:
        dist.all_reduce(tensor)
    assert torch.equal(tensor.coalesce().values(), torch.ones(1))
    with pytest.raises(dist.DistBackendError) as again:
        dist.barrier()
    failure = backend_of().failure()
    assert failure
    assert failure in str(error.value)
    assert failure in str(again.value)


# ---------------------------------------------------------------- no more threads


@contextmanager
def no_threads() -> Iterator[None]:
    """Let no thread be started: new ones would get a stack larger than the address space."""
    libc = ctypes.CDLL(None)
    attributes = ctypes.create_string_buffer(256)
    usual = ctypes.create_string_buffer(256)
    assert libc.pthread_getattr_default_np(usual) == 0
    assert libc.pthread_attr_init(attributes) == 0
    assert libc.pthread_attr_setstacksize(attributes, ctypes.c_size_t(1 << 48)) == 0
    assert libc.pthread_setattr_default_np(attributes) == 0
    try:
        yield
    finally:
        assert libc.pthread_setattr_default_np(usual) == 0
        libc.pthread_attr_destroy(usual)
        libc.pthread_attr_destroy(attributes)


@in_ranks(2, "nodes", fresh=True)
def test_collectives_run_on_the_caller_if_no_thread_can_be_started(rank: int, world: int) -> None:
    with no_threads():
        works = [dist.all_reduce(torch.full((3,), float(rank)), async_op=True) for _ in range(3)]
        for work in works:
            work.wait()
            assert work.result()[0][0].item() == sum(range(world))


@in_ranks(2, fresh=True)  # over TCP the peers hear of it only at their timeout, since telling them takes a thread, too
def test_a_transfer_without_the_thread_that_it_needs_fails_the_group(rank: int, world: int) -> None:
    with no_threads():
        if rank == 0:
            first, second = torch.empty(3), torch.empty(3)
            works = [dist.irecv(first, 1)]
            with pytest.raises(dist.DistBackendError) as error:
                works[0].wait()
            with pytest.raises(dist.DistBackendError):
                dist.irecv(second, 1).wait()
        else:
            with pytest.raises(dist.DistBackendError) as error:
                dist.all_reduce(torch.ones(1))
        with pytest.raises(dist.DistBackendError, match="cannot start a thread"):
            dist.barrier()
    assert re.search(r"rank 0 \(host [^ ]+, pid \d+\) cannot start a thread", str(error.value)), error.value


@pytest.mark.skipif(not HAS_HOOKS, reason="torch has abort hooks from 2.15 on")
@in_ranks(2, fresh=True)
def test_abort_hooks_run_if_no_thread_can_be_started(rank: int, world: int) -> None:
    calls: list[str] = []
    backend_of().register_abort_hook(1, lambda: calls.append("hook"))
    with no_threads(), pytest.raises(dist.DistBackendError):
        dist.all_reduce(torch.ones(2 + rank))
    assert calls == ["hook"]


# ---------------------------------------------------------------- waits without an end


@pytest.mark.parametrize("days", [107_700, timedelta.max.days])  # just beyond 63 bits of nanoseconds, and the longest
@in_ranks(2, "nodes", fresh=True)
def test_a_timeout_beyond_the_range_of_the_clock_means_never(rank: int, world: int, days: int) -> None:
    store = dist.distributed_c10d._get_default_store()
    tensor = torch.full((2,), float(rank))
    if rank == 0:
        for i, work in enumerate([dist.all_reduce(tensor, async_op=True), dist.irecv(torch.empty(1), 1)]):
            # Only after the wait has begun, which would otherwise return at once.
            threading.Timer(0.2, store.set, (f"go on {i}", "")).start()
            work.wait(timedelta(days=days))
    else:
        store.wait(["go on 0"])
        dist.all_reduce(tensor)
        store.wait(["go on 1"])
        dist.send(torch.ones(1), 0)
    assert tensor[0].item() == sum(range(world))
