"""c10d's windows: one-sided access to the tensors of the ranks of a node."""

from __future__ import annotations

import concurrent.futures
import contextlib
import datetime
import gc
import os
import re
import signal
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from patience import check_soon
from probes import HAS_HOOKS, backend_of
from ranks import in_ranks, run_ranks

pytestmark = pytest.mark.skipif(not HAS_HOOKS, reason="torch has windows from 2.15 on")

with contextlib.suppress(ImportError):
    import torch.distributed._symmetric_memory as symm_mem

COUNT = 1000


def zeros(count: int = COUNT, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return symm_mem.empty(count, dtype=dtype, device="cpu").zero_()


def within(seconds: float) -> Any:
    options = torch._C._distributed_c10d.WaitSignalOptions()
    options.timeout = datetime.timedelta(seconds=seconds)
    return options


@pytest.mark.parametrize("world", [1, 2, 4])
@in_ranks()
def test_put_writes_into_the_tensor_of_the_peer(rank, world):
    assert dist.group.WORLD.supports_window
    own = zeros()
    window = dist.distributed_c10d._new_window(own)
    right, left = (rank + 1) % world, (rank - 1) % world
    source = torch.arange(10.0) + rank
    assert window.put(source, right, 5, False) is None
    assert window.signal(right, False) is None
    assert window.wait_signal(left, False) is None
    assert torch.equal(own[5:15], torch.arange(10.0) + left)
    assert not own[:5].any()
    assert not own[15:].any()
    dist.barrier()
    # Asynchronously, and a source that is not contiguous.
    work = window.put(torch.stack([source, source]).T[:, 0], right, COUNT - 10, True)
    assert work.is_completed()
    assert work.wait()
    window.signal(right, True).wait()
    window.wait_signal(left, True).wait()
    assert torch.equal(own[-10:], torch.arange(10.0) + left)
    assert torch.equal(window.map_remote_tensor(left)[5:15], torch.arange(10.0) + (left - 1) % world)
    assert window.get_attr(left).access_type == torch._C._distributed_c10d.WindowAccessType.UNIFIED
    window.tensor_deregister()
    with pytest.raises(RuntimeError, match="has no tensor"):
        window.put(source, right, 0, False)


@in_ranks(2)
def test_tensors_may_differ_and_begin_anywhere_in_their_memory(rank, world):
    own = zeros(20 + rank, torch.int64 if rank else torch.bfloat16)
    window = dist.distributed_c10d._new_window()
    window.tensor_register(own[4 * rank :])
    peers = window.map_remote_tensor(1 - rank)
    assert (peers.dtype, peers.numel()) == ((torch.bfloat16, 20) if rank else (torch.int64, 17))
    window.put(torch.full((3,), 7, dtype=peers.dtype), 1 - rank, 2, False)
    window.signal(1 - rank, False)
    window.wait_signal(1 - rank, False)
    assert own[4 * rank + 2 : 4 * rank + 5].tolist() == [7] * 3
    assert own.sum() == 21
    window.tensor_deregister()
    # The same window again, with another tensor.
    other = zeros(3)
    window.tensor_register(other, owning=False)
    window.put(torch.ones(3), 1 - rank, 0, False)
    window.signal(1 - rank, False)
    window.wait_signal(1 - rank, False)
    assert other.sum() == 3


@in_ranks(2)
def test_signals_are_counted_for_each_window(rank, world):
    first, second = (dist.distributed_c10d._new_window(zeros(1)) for _ in range(2))
    if rank == 0:
        for _ in range(3):
            first.signal(1, False)
        second.signal(1, False)
    else:
        works = [first.wait_signal(0, True) for _ in range(3)]
        for work in works:
            work.wait()
            assert work.is_completed()
        fourth = first.wait_signal(0, True)
        assert not fourth.is_completed()
        with pytest.raises(dist.DistBackendError, match=r"wait_signal of a window: Timed out waiting 50ms .*rank 0"):
            first.wait_signal(0, False, within(0.05))
        with pytest.raises(dist.DistBackendError, match="Timed out"):
            fourth.wait(datetime.timedelta(milliseconds=50))
        second.wait_signal(0, False)
        second.signal(0, False)
        fourth.wait()
    if rank == 0:
        second.wait_signal(1, False)
        first.signal(1, False)
    dist.barrier()


@in_ranks(2)
def test_a_window_keeps_the_memory(rank, world):
    window = dist.distributed_c10d._new_window(zeros())
    gc.collect()
    window.put(torch.full((COUNT,), rank + 1.0), 1 - rank, 0, False)
    window.signal(1 - rank, False)
    window.wait_signal(1 - rank, False)
    view = window.map_remote_tensor(rank)
    del window
    gc.collect()
    assert torch.equal(view, torch.full((COUNT,), 2.0 - rank))
    dist.barrier()


@in_ranks(2)
def test_what_cannot_be_registered_is_refused_by_all_ranks(rank, world):
    bad = [
        (torch.ones(4), "not in symmetric memory; allocate it with"),
        (zeros(6).view(2, 3).T, "not contiguous"),
        (zeros(4, torch.complex64).conj(), "not contiguous"),
        (torch.eye(3).to_sparse(), "not contiguous"),
    ]
    for tensor, why in bad:
        with pytest.raises(ValueError, match=f"the tensor of rank 1 for a window is {why}"):
            dist.distributed_c10d._new_window(tensor if rank else zeros(4))
    dist.distributed_c10d._new_window(zeros(4))


@in_ranks(2)
def test_what_does_not_fit_is_refused(rank, world):
    window = dist.distributed_c10d._new_window(zeros(4))
    wrong = [
        ((torch.ones(5), 0, 0), "5 elements at offset 0 are not inside the 4 elements of rank 0"),
        ((torch.ones(1), 0, 4), "1 elements at offset 4"),
        ((torch.ones(1), 0, -1), "offset -1"),
        ((torch.ones(1), 0, 2**62), "are not inside"),
        ((torch.ones(1, dtype=torch.int32), 0, 0), "put: the tensor is Int, the window of rank 0 Float"),
        ((torch.ones(1), 2, 0), "rank 2 is not one of the 2 ranks"),
    ]
    for arguments, why in wrong:
        with pytest.raises(ValueError, match=why):
            window.put(*arguments, False)
    with pytest.raises(ValueError, match="rank -1 is not one"):
        window.signal(-1, False)
    window.put(torch.empty(0), 0, 4, False)
    dist.barrier()


@in_ranks(2)
def test_put_resolves_lazy_conjugates(rank, world):
    own = zeros(2, torch.complex64)
    window = dist.distributed_c10d._new_window(own)
    window.put(torch.tensor([1 + 2j, 3 - 4j]).conj(), 1 - rank, 0, False)
    window.signal(1 - rank, False)
    window.wait_signal(1 - rank, False)
    assert own.tolist() == [1 - 2j, 3 + 4j]
    dist.barrier()


@in_ranks(2, nodes=2)
def test_groups_of_several_nodes_have_no_windows(rank, world):
    assert not dist.group.WORLD.supports_window
    with pytest.raises(ValueError, match=r"on 2 nodes. Make a group of the ranks of each node"):
        dist.distributed_c10d._new_window(zeros(1))


def dies(rank: int, world: int) -> tuple[str, float]:
    store = dist.distributed_c10d._get_default_store()
    window = dist.distributed_c10d._new_window(zeros(1))
    if rank == 1:
        store.set("died at", str(time.time()))
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(dist.DistNetworkError) as error:
        window.wait_signal(1, False)
    seconds = time.time() - float(store.get("died at"))
    work = window.wait_signal(1, True)
    assert work.is_completed()
    assert not work.is_success()
    with pytest.raises(dist.DistNetworkError):
        work.wait()
    return str(error.value), seconds


def test_a_killed_peer_is_named_within_a_second():
    def attempt() -> float:
        results = run_ranks(3, dies, killed=[1])
        for text, _ in (results[0], results[2]):
            assert re.search(r"rank 1 \(host [^ ]+, pid \d+\) died during wait_signal of a window", text), text
        return max(results[0][1], results[2][1])

    check_soon(1, attempt)


def polls(rank: int, world: int) -> str:
    """Return the error of a signal that never comes, which rank 0 asks for and does not wait for."""
    window = dist.distributed_c10d._new_window(zeros(1))
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    work = window.wait_signal(1, True)
    end = time.monotonic() + 30
    while not work.is_completed():
        assert time.monotonic() < end
        time.sleep(0.001)
    with pytest.raises(dist.DistNetworkError) as error:
        work.wait()
    return str(error.value)


def test_a_killed_peer_is_noticed_by_asking_whether_the_signal_has_come():
    assert "rank 1 (host" in run_ranks(2, polls, killed=[1])[0]


@in_ranks(2)
def test_threads_may_ask_for_a_signal_that_another_waits_for(rank: int, world: int) -> None:
    window = dist.distributed_c10d._new_window(zeros(1))
    store = dist.distributed_c10d._get_default_store()
    if rank == 1:
        store.get("asked for long")
        window.signal(0, False)
        dist.barrier()
        return
    work = window.wait_signal(1, True)
    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        waits = [threads.submit(work.wait) for _ in range(2)]
        asks = threads.submit(lambda: [work.is_completed() for _ in range(20_000)])
        # The main thread waits too, and now and then runs signal handlers, for which it needs Python's lock.
        told = threads.submit(lambda: (asks.result(), store.set("asked for long", "")))
        work.wait()
        assert [one.result() for one in waits] == [True, True]
        told.result()
    assert work.is_completed()
    dist.barrier()


def aborts(rank: int, world: int) -> str:
    window = dist.distributed_c10d._new_window(zeros(1))
    dist.barrier()
    if rank == 1:
        backend_of().abort()
        return ""
    with pytest.raises(dist.DistError) as error:
        window.wait_signal(1, False)
    return str(error.value)


def test_abort_of_the_group_ends_the_waits_of_its_windows():
    text, _ = run_ranks(2, aborts)
    assert "rank 1" in text
    assert "aborted the group" in text
