"""torch.distributed._symmetric_memory on the CPU: ranks that are late, dead or interrupted."""

from __future__ import annotations

import os
import re
import signal
import threading
import time

import pytest
import torch
import torch.distributed as dist
from patience import check_soon
from probes import HAS_HOOKS, backend_of
from ranks import in_ranks, run_ranks
from symmetric import COUNT, share, symm_mem

pytestmark = pytest.mark.skipif(not HAS_HOOKS, reason="the package has symmetric memory from torch 2.15 on")


@in_ranks(2)
def test_a_signal_that_does_not_come_can_be_awaited_again(rank, world):
    _, handle = share()
    if rank == 0:
        with pytest.raises(dist.DistBackendError) as error:
            handle.wait_signal(1, channel=2, timeout_ms=50)
        text = str(error.value)
        assert "wait_signal (channel 2) on symmetric memory: Timed out waiting 50ms on rank 0" in text
        assert re.search(r"for rank 1 \(host [^ ]+, pid \d+\)", text)
        handle.put_signal(1)
        handle.wait_signal(1, channel=2, timeout_ms=2**64 - 1)
    else:
        handle.wait_signal(0)
        handle.put_signal(0, channel=2)
    handle.barrier()


def late(rank: int, world: int) -> str:
    _, handle = share()
    store = dist.distributed_c10d._get_default_store()
    if rank == 1:
        store.wait(["given up"])
    with pytest.raises(dist.DistBackendError) as error:
        handle.barrier(timeout_ms=100)
    store.set("given up", "")
    # The process group goes on, but not its symmetric memory.
    with pytest.raises(dist.DistBackendError):
        share()
    dist.barrier()
    assert backend_of().failure() == ""
    return str(error.value)


def test_a_barrier_that_times_out_fails_on_all_ranks():
    texts = run_ranks(2, late)
    assert "barrier (channel 0) on symmetric memory: Timed out waiting 100ms" in texts[0]
    assert "for rank 1" in texts[0]
    assert texts[1] == texts[0]


def dies(rank: int, world: int, call: str) -> tuple[str, float]:
    _, handle = share()
    store = dist.distributed_c10d._get_default_store()
    handle.barrier()
    if rank == 1:
        store.set("died at", str(time.time()))
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(dist.DistNetworkError) as error:
        {
            "barrier": handle.barrier,
            "wait_signal": lambda: handle.wait_signal(1),
            "put_signal": lambda: [handle.put_signal(1) for _ in range(2)],
            "rendezvous": lambda: share(),
        }[call]()
    return str(error.value), time.time() - float(store.get("died at"))


@pytest.mark.parametrize("call", ["barrier", "wait_signal", "put_signal", "rendezvous"])
def test_survivors_name_a_killed_rank_within_a_second(call):
    def attempt() -> float:
        results = run_ranks(3, dies, call, killed=[1])
        for text, _ in (results[0], results[2]):
            assert re.search(r"rank 1 \(host [^ ]+, pid \d+\) died during ", text), text
        return max(results[0][1], results[2][1])

    before = set(os.listdir("/dev/shm"))
    check_soon(1, attempt)
    assert not [name for name in set(os.listdir("/dev/shm")) - before if "ours" in name]


def dies_before(rank: int, world: int) -> str:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(dist.DistError) as error:
        share()
    return str(error.value)


def test_a_rank_that_dies_before_the_first_rendezvous_is_named():
    results = run_ranks(2, dies_before, killed=[1], pg_timeout=2)
    assert "rank 1 of the symmetric memory of group '0' did not publish" in results[0]


def interrupted(rank: int, world: int) -> str:
    _, handle = share()
    handle.barrier()
    if rank == 1:
        with pytest.raises(dist.DistBackendError) as error:
            handle.barrier()
        return str(error.value)
    main = threading.main_thread().ident
    timer = threading.Timer(0.2, lambda: signal.pthread_kill(main, signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        handle.wait_signal(1, channel=1)
    timer.join()
    return ""


def test_an_interrupt_ends_a_wait_and_all_ranks_hear_of_it():
    _, text = run_ranks(2, interrupted)
    assert "KeyboardInterrupt" in text
    assert "rank 0" in text


@in_ranks(4, nodes=2)
def test_ranks_of_several_nodes_are_refused_and_those_of_each_are_not(rank, world):
    with pytest.raises(ValueError, match=r"on 2 nodes: rank 0, 1 beside .*; rank 2, 3 beside .*new_group"):
        share()
    groups = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    tensor, handle = share(group=groups[rank // 2])
    tensor.fill_(rank)
    handle.barrier()
    assert handle.get_buffer(1 - rank % 2, (COUNT,), torch.float32)[0] == rank ^ 1
    handle.barrier()


@in_ranks(2)
def test_memory_that_cannot_be_had_is_an_error(rank, world):
    with pytest.raises(RuntimeError, match=r"cannot (size|map|reserve)"):
        symm_mem.empty(1 << 60, dtype=torch.uint8, device="cpu")
    share()
