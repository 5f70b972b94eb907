"""Peers that are killed, late or stopped: the other ranks name them soon."""

from __future__ import annotations

import functools
import os
import re
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from patience import check_soon
from probes import backend_of, failed_with, reached
from ranks import run_ranks

# --- killed ----------------------------------------------------------------------------------------------------------


def die_in_a_loop(rank: int, world: int, victim: int, asynchronous: bool) -> dict[str, Any]:
    last = torch.zeros(1)
    died_at = dist.distributed_c10d._get_default_store()
    for i in range(100):
        tensor = torch.ones(10 if i % 2 else 60_000)
        dist.all_reduce(tensor)
        if i == 20 and rank == victim:
            died_at.set("died at", str(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)
        if i < 20:
            continue
        works = []
        try:
            works = [dist.all_reduce(tensor, async_op=True) for _ in range(3)] if asynchronous else []
            for work in works:
                work.wait()
            dist.all_reduce(last)
        except dist.DistNetworkError as error:
            now = time.time()
            for work in works:  # everything queued has failed, too
                assert not work.is_success() or work is works[0]
            return {
                "text": str(error),
                "seconds": now - float(died_at.get("died at")),
                "remote": failed_with("REMOTE_ERROR"),
                "failure": backend_of().failure(),
            }
    raise AssertionError("nobody noticed")


@pytest.mark.parametrize(("world", "kills", "count"), [(2, 4, 1), (4, 8, 1), (4, 8, 2)])
def test_survivors_name_a_killed_rank_within_a_second(world, kills, count):
    def attempt(kill: int) -> float:
        victim = kill % world
        results = run_ranks(world, die_in_a_loop, victim, kill // world % 2 == 0, killed=[victim], nodes=count)
        survivors = results[:victim] + results[victim + 1 :]
        for result in survivors:
            assert re.search(rf"rank {victim} \(host [^ ]+, pid \d+\) died", result["text"]), result["text"]
            assert result["remote"]
            assert f"rank {victim}" in result["failure"]
        return max(result["seconds"] for result in survivors)

    before = set(os.listdir("/dev/shm"))
    # On a busy machine some attempts may be late. If many are, the machine is not the reason.
    late = [kill for kill in range(kills) if attempt(kill) >= 1]
    assert len(late) <= 1, late
    for kill in late:
        check_soon(1, functools.partial(attempt, kill))
    assert not [name for name in set(os.listdir("/dev/shm")) - before if "ours" in name], "the dead left memory behind"


def die_while_memory_is_read(rank: int, world: int, delay: float) -> str:
    """Rank 1 dies at some moment of reductions for which ranks read one another's memory, if that is faster."""
    tensor, part = torch.ones(3 << 20), torch.empty(1 << 20)
    with pytest.raises(dist.DistNetworkError) as error:
        for i in range(10_000):
            if i == 5 and rank == 1:
                threading.Timer(delay, os.kill, (os.getpid(), signal.SIGKILL)).start()
            if i % 2:
                dist.all_reduce(tensor, dist.ReduceOp.MAX)
            else:
                dist.reduce_scatter_tensor(part, tensor, dist.ReduceOp.MAX)
    return str(error.value)


@pytest.mark.parametrize("delay", [0.0, 0.013, 0.037, 0.061])
def test_a_rank_killed_while_its_memory_is_read_is_named(delay):
    results = run_ranks(3, die_while_memory_is_read, delay, killed=[1])
    for text in (results[0], results[2]):
        assert re.search(r"rank 1 \(host [^ ]+, pid \d+\) died", text), text


def die_in_p2p(rank: int, world: int) -> tuple[str, float]:
    store = dist.distributed_c10d._get_default_store()
    dist.barrier()
    if rank == 1:
        store.set("died at", str(time.time()))
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(dist.DistNetworkError) as error:
        if rank == 0:
            dist.recv(torch.empty(4), 1)
        else:
            dist.irecv(torch.empty(4), 1).get_future().wait()
    return str(error.value), time.time() - float(store.get("died at"))


def test_a_killed_sender_is_named(nodes):
    def attempt() -> float:
        results = run_ranks(3, die_in_p2p, killed=[1], nodes=nodes)
        for text, _ in (results[0], results[2]):
            assert "rank 1" in text
        return max(results[0][1], results[2][1])

    check_soon(1, attempt)


def dies_in_another_group(rank: int, world: int) -> str:
    """Rank 1 dies in a group with rank 0, which then gives up all its groups. Rank 2 waits for rank 0."""
    both = dist.new_group([0, 1])
    if rank == 0:
        dist.send(torch.ones(4), 2)
    elif rank == 2:
        dist.recv(torch.empty(4), 0)  # so that both are connected
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(dist.DistNetworkError) as error:
        if rank == 0:
            dist.all_reduce(torch.ones(1), group=both)
        else:
            dist.recv(torch.empty(4), 0)
    if rank == 0:
        dist.destroy_process_group()
    return str(error.value)


def test_a_rank_that_gives_up_all_groups_says_who_died(nodes):
    results = run_ranks(3, dies_in_another_group, killed=[1], nodes=nodes)
    for text in (results[0], results[2]):
        assert re.search(r"rank 1 \(host [^ ]+, pid \d+\) died", text), text


# --- late ------------------------------------------------------------------------------------------------------------


def stall(rank: int, world: int, call: str) -> tuple[str, float, float, bool]:
    """Wait for rank 1. Return the error, the times when the wait began and ended, and whether it was a timeout."""
    store = dist.distributed_c10d._get_default_store()
    store.set(f"pid {rank}", str(os.getpid()))
    dist.barrier()
    if rank == 1:
        store.get("may go on")
        return "", 0.0, 0.0, False
    start = time.monotonic()
    with pytest.raises(dist.DistBackendError) as error:
        if call == "recv":
            dist.recv(torch.empty(4), 1)
        else:
            dist.all_reduce(torch.ones(4))
    end = time.monotonic()
    late = failed_with("TIMEOUT")
    if store.add("raised", 1) == world - 1:
        store.set("may go on", "")
    return str(error.value), start, end, late


@pytest.mark.parametrize("call", ["all_reduce", "recv"])
def test_an_absent_rank_is_named_at_the_timeout(call, nodes):
    def attempt() -> float:
        first, _, last = run_ranks(3, stall, call, pg_timeout=2, nodes=nodes)
        for text, _, _, late in (first, last):
            assert "rank 1" in text
            assert " Timed out waiting 2000ms" in text  # PyTorch's own words, which programs look for
            assert late
        # A rank that begins to wait later hears of it at the first rank's timeout.
        assert min(first[2], last[2]) - min(first[1], last[1]) > 1.8
        return max(first[2] - first[1], last[2] - last[1])

    check_soon(3, attempt)


def stopped(rank: int, world: int, seconds: float | None) -> str:
    """Let rank 0 stop rank 1 by SIGSTOP for ``seconds``, or until it gets an error. Return the error, if any."""
    store = dist.distributed_c10d._get_default_store()
    store.set(f"pid {rank}", str(os.getpid()))
    dist.barrier()
    other = int(store.get("pid 1"))
    if rank == 0:
        os.kill(other, signal.SIGSTOP)
        if seconds is not None:
            threading.Timer(seconds, os.kill, (other, signal.SIGCONT)).start()
    tensor = torch.ones(3)
    try:
        for _ in range(10):
            dist.all_reduce(tensor.fill_(1))
    except dist.DistBackendError as error:
        if rank == 0:
            os.kill(other, signal.SIGCONT)
        return str(error)
    assert tensor[0].item() == world
    return ""


def test_a_stopped_rank_that_continues_in_time_does_no_harm(nodes):
    assert run_ranks(3, stopped, 1.0, pg_timeout=3, nodes=nodes) == ["", "", ""]


def test_a_stopped_rank_is_named_at_the_timeout(nodes):
    texts = run_ranks(3, stopped, None, pg_timeout=3, nodes=nodes)
    assert all("rank 1 (host" in text for text in texts), texts


LARGE = 1 << 23  # elements: reducing these takes long enough to stop a rank meanwhile


def stopped_in_the_middle(rank: int, world: int) -> bool:
    """Let rank 0 stop rank 1 while that reduces, and let it go on when the other ranks have given up on it.

    Return whether the stop came in time. If so, the tensors of the other ranks must have stayed as they were.
    """
    store = dist.distributed_c10d._get_default_store()
    store.set(f"pid {rank}", str(os.getpid()))
    tensor = backend_of().allocate_tensor(LARGE, dtype=torch.float32, device=torch.device("cpu")).fill_(1)
    other = int(store.get("pid 1"))
    numbers = tensor.numpy()

    def stop_soon() -> None:
        assert reached(lambda: (numbers[::4096] != 1).any())
        os.kill(other, signal.SIGSTOP)

    stopper = threading.Thread(target=stop_soon)
    # Allocating takes long on a busy machine, perhaps longer than the group's timeout.
    if store.add("ready", 1) == world:
        store.set("all are ready", "")
    store.wait(["all are ready"])
    if rank == 0:
        stopper.start()
    try:
        dist.all_reduce(tensor)
        in_time = False
    except dist.DistBackendError as error:
        in_time = "rank 1 (host" in str(error)
    if rank == 1:
        store.set("went on", "")
        return in_time
    tensor.fill_(7)
    if store.add("given up", 1) == world - 1:
        store.set("all have given up", "")
    if rank == 0:
        stopper.join()
        assert reached(lambda: ") T" in Path(f"/proc/{other}/stat").read_text())
        store.wait(["all have given up"])
        os.kill(other, signal.SIGCONT)
    store.wait(["went on"])
    assert tensor.eq(7).all()
    return in_time


def test_a_rank_that_continues_after_the_others_gave_up_does_not_write_to_their_tensors(nodes):
    def attempt() -> bool:
        return all(run_ranks(4, stopped_in_the_middle, pg_timeout=3, nodes=nodes))

    assert any(attempt() for _ in range(5)), "no stop came in time"
