"""Signals that arrive while a rank waits: Python's handlers run soon, and an exception in one ends the wait."""

from __future__ import annotations

import contextlib
import datetime
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from patience import check_soon
from probes import HAS_HOOKS, backend_of, reached, waits_for_another_thread, waits_for_peers
from ranks import in_ranks, run_ranks

# --- handlers that raise ---------------------------------------------------------------------------------------------


def start(what: str) -> Callable[[], object]:
    """Return a call that waits for rank 1, which takes no part in it."""
    if what == "wait of an all_reduce":
        return dist.all_reduce(torch.ones(4), async_op=True).wait
    if what == "wait with a timeout":
        work = dist.all_reduce(torch.ones(4), async_op=True)
        return lambda: work.wait(datetime.timedelta(seconds=50))
    if what == "wait of a receive with a timeout":
        work = dist.irecv(torch.empty(4), 1)
        return lambda: work.wait(datetime.timedelta(seconds=50))
    if what == "destroy":
        dist.all_reduce(torch.ones(4), async_op=True)
        return dist.destroy_process_group
    return {
        "all_reduce": lambda: dist.all_reduce(torch.ones(4)),
        "large all_reduce": lambda: dist.all_reduce(torch.ones(1 << 20)),
        "barrier": dist.barrier,
        "monitored_barrier": lambda: backend_of().monitored_barrier(datetime.timedelta(seconds=50)),
        "recv": lambda: dist.recv(torch.empty(4), 1),
        "recv of any": lambda: dist.recv(torch.empty(4)),
        "send": lambda: [dist.send(torch.ones(1 << 20), 1) for _ in range(50)],
    }[what]


def in_a_wait(thread: int) -> bool:
    return waits_for_peers(thread) or waits_for_another_thread(thread)


@contextlib.contextmanager
def signal_in_a_wait(number: signal.Signals, delay: float = 0) -> Iterator[list[float]]:
    """Send a signal to this process as soon as its main thread waits. Yield a list that gets the time of the signal."""
    waiter = threading.get_native_id()
    sent: list[float] = []

    def send() -> None:
        assert reached(lambda: in_a_wait(waiter))
        time.sleep(delay)
        sent.append(time.time())
        os.kill(os.getpid(), number)

    sender = threading.Thread(target=send)
    sender.start()
    try:
        yield sent
    finally:
        sender.join()


def interrupted(rank: int, world: int, what: str) -> tuple[float, str]:
    """Return the seconds from the signal until this rank heard of it, and its error."""
    store = dist.distributed_c10d._get_default_store()
    dist.barrier()
    if rank == 1:
        sent = float(store.get("sent"))
        assert reached(lambda: backend_of().failure() != "")
        failure = backend_of().failure()
        return time.time() - sent, failure
    call = start(what)
    with signal_in_a_wait(signal.SIGINT) as sent, pytest.raises(KeyboardInterrupt):
        call()
    seconds = time.time() - sent[0]
    store.set("sent", str(sent[0]))
    return seconds, "" if what == "destroy" else backend_of().failure()


CALLS = [
    "all_reduce",
    "large all_reduce",
    "wait of an all_reduce",
    "wait with a timeout",
    "barrier",
    "monitored_barrier",
    "recv",
    "recv of any",
    "send",
    "wait of a receive with a timeout",
    "destroy",
]


@pytest.mark.parametrize("count", [1, 2], ids=["one node", "two nodes"])
@pytest.mark.parametrize("what", CALLS)
def test_an_interrupt_ends_a_wait_within_200_ms_and_fails_the_group(what, count):
    def attempt() -> float:
        (seconds, text), (_, heard) = run_ranks(2, interrupted, what, nodes=count)
        if what != "destroy":
            assert "rank 0 (host" in text
            assert "was interrupted (KeyboardInterrupt)" in text
            assert "rank 0" in heard
        return seconds

    check_soon(0.2, attempt)


def peers_hear(rank: int, world: int) -> float:
    store = dist.distributed_c10d._get_default_store()
    dist.barrier()
    if rank == 2:
        store.get("sent")
        return 0.0
    if rank == 1:
        with pytest.raises(dist.DistBackendError, match=r"rank 0 \(host .*was interrupted \(KeyboardInterrupt\)"):
            dist.all_reduce(torch.ones(4))
        return time.time() - float(store.get("sent"))
    with signal_in_a_wait(signal.SIGINT, delay=0.2) as sent, pytest.raises(KeyboardInterrupt):
        dist.all_reduce(torch.ones(4))
    store.set("sent", str(sent[0]))
    return 0.0


def test_peers_hear_of_an_interrupt_at_once(played_nodes):
    check_soon(1, lambda: run_ranks(3, peers_hear, nodes=played_nodes)[1])


# --- handlers that return --------------------------------------------------------------------------------------------


def handled(rank: int, world: int, what: str) -> tuple[float, int]:
    """Return the seconds until rank 0's handler ran, and how often it ran."""
    store = dist.distributed_c10d._get_default_store()
    dist.barrier()
    ran: list[float] = []
    tensor = torch.ones(1 << 18)
    if rank == 1:
        store.get("handled")
        if what == "recv":
            dist.send(tensor, 0)
        else:
            dist.all_reduce(tensor)
        dist.barrier()
        return 0.0, 0

    def handler(number: int, frame: object) -> None:
        ran.append(time.time())
        store.set("handled", "")

    before = signal.signal(signal.SIGUSR2, handler)
    try:
        with signal_in_a_wait(signal.SIGUSR2) as sent:
            if what == "recv":
                dist.recv(tensor.zero_(), 1)
            elif what == "wait":
                dist.all_reduce(tensor, async_op=True).wait()
            else:
                dist.all_reduce(tensor)
    finally:
        signal.signal(signal.SIGUSR2, before)
    assert tensor.eq(1 if what == "recv" else world).all()
    dist.barrier()
    return ran[0] - sent[0], len(ran)


@pytest.mark.parametrize("what", ["all_reduce", "wait", "recv"])
def test_a_handler_that_returns_runs_at_once_and_does_no_harm(what, played_nodes):
    def attempt() -> float:
        seconds, count = run_ranks(2, handled, what, nodes=played_nodes)[0]
        assert count == 1
        return seconds

    check_soon(0.2, attempt)


@in_ranks(2, "played_nodes", fresh=True)
def test_a_handler_during_a_collective_cannot_start_another(rank: int, world: int) -> None:
    store = dist.distributed_c10d._get_default_store()
    dist.barrier()
    texts: list[str] = []
    if rank == 0:

        def handler(number: int, frame: object) -> None:
            with pytest.raises(RuntimeError, match="set a flag in the handler") as error:
                dist.all_reduce(torch.ones(4))
            texts.append(str(error.value))
            store.set("handled", "")

        before = signal.signal(signal.SIGUSR2, handler)
        with signal_in_a_wait(signal.SIGUSR2):
            dist.barrier()
        signal.signal(signal.SIGUSR2, before)
    else:
        store.get("handled")
        dist.barrier()
    dist.barrier()
    assert bool(texts) == (rank == 0)


@in_ranks(2, "played_nodes", fresh=True)
def test_a_handler_during_a_wait_cannot_wait_for_other_calls(rank: int, world: int) -> None:
    store = dist.distributed_c10d._get_default_store()
    dist.barrier()
    tensors = [torch.full((4,), 1.0 + call) for call in range(2)]
    works: list[dist.Work] = []
    if rank == 0:
        refused: list[dist.Work] = []

        def handler(number: int, frame: object) -> None:
            try:
                for work in works:
                    with pytest.raises(RuntimeError, match="set a flag in the handler"):
                        work.wait()
                    refused.append(work)
            finally:
                store.set("handled", "")

        before = signal.signal(signal.SIGUSR2, handler)
        works += [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
        with signal_in_a_wait(signal.SIGUSR2):
            works[0].wait()
        signal.signal(signal.SIGUSR2, before)
        assert refused == works
    else:
        store.get("handled")
        works += [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    for work in works:
        work.wait()
    assert [tensor.unique().tolist() for tensor in tensors] == [[2.0], [4.0]]


def destroyed_in_a_handler(rank: int, world: int, queued: int) -> tuple[str, float]:
    """Return the error of the call that the handler interrupted, or of the peer's, and the seconds that it took."""
    seconds = 0.0
    store = dist.distributed_c10d._get_default_store()
    dist.barrier()
    if rank == 1:
        store.get("destroyed")
        with pytest.raises(dist.DistBackendError) as error:
            dist.all_reduce(torch.ones(4))
        return str(error.value), seconds

    def handler(number: int, frame: object) -> None:
        nonlocal seconds
        start = time.monotonic()
        try:
            dist.destroy_process_group()
        finally:
            seconds = time.monotonic() - start
            store.set("destroyed", "")

    before = signal.signal(signal.SIGUSR2, handler)
    works = [dist.all_reduce(torch.ones(4), async_op=True) for _ in range(1 + queued)]
    with signal_in_a_wait(signal.SIGUSR2), pytest.raises(dist.DistBackendError) as error:
        works[0].wait()
    signal.signal(signal.SIGUSR2, before)
    return str(error.value), seconds


@pytest.mark.parametrize("queued", [0, 1])
def test_a_handler_may_destroy_the_group_that_it_has_interrupted(played_nodes, queued):
    def attempt() -> float:
        (here, seconds), (peer, _) = run_ranks(2, destroyed_in_a_handler, queued, nodes=played_nodes)
        assert "while operations were still pending" in here
        assert "rank 0 (host" in peer
        return seconds

    check_soon(1, attempt)


@pytest.mark.skipif(not HAS_HOOKS, reason="torch has windows from 2.15 on")
@in_ranks(2, fresh=True)
def test_a_handler_may_ask_whether_a_signal_has_come(rank: int, world: int) -> None:
    import torch.distributed._symmetric_memory as symm_mem

    store = dist.distributed_c10d._get_default_store()
    window = dist.distributed_c10d._new_window(symm_mem.empty(1, device="cpu"))
    if rank == 1:
        store.get("handled")
        dist.barrier()
        window.signal(0, False)
        dist.barrier()
        return
    work = window.wait_signal(1, True)
    answers: list[bool] = []

    def handler(number: int, frame: object) -> None:
        answers.append(work.is_completed())
        store.set("handled", "")

    before = signal.signal(signal.SIGUSR2, handler)
    with signal_in_a_wait(signal.SIGUSR2):
        dist.barrier()
    signal.signal(signal.SIGUSR2, before)
    assert answers == [False]
    assert work.wait()
    dist.barrier()


# --- callbacks, and groups that are being made -----------------------------------------------------------------------


def interrupted_in_a_callback(rank: int, world: int) -> tuple[float, str]:
    """Interrupt rank 0 in a callback that runs at once, and whose collective rank 1 does not start."""
    work = dist.all_reduce(torch.ones(4), async_op=True)
    work.wait()
    if rank == 1:
        assert reached(lambda: backend_of().failure() != "")
        return 0.0, backend_of().failure()
    with signal_in_a_wait(signal.SIGINT) as sent:
        result = work.get_future().then(lambda _: dist.all_reduce(torch.ones(4)))
        ended = time.time()
    with pytest.raises(Exception, match="KeyboardInterrupt") as raised:
        result.wait()
    return ended - sent[0], str(raised.value)


def test_an_interrupt_ends_a_callbacks_wait_for_peers(played_nodes):
    def run() -> float:
        (seconds, _), (_, heard) = run_ranks(2, interrupted_in_a_callback, nodes=played_nodes)
        assert re.search(r"rank 0 \(host [^ ]+, pid \d+\) was interrupted \(KeyboardInterrupt\)", heard)
        return seconds

    check_soon(0.2, run)


def interrupted_joining(rank: int, world: int) -> float:
    """Interrupt rank 0 while it waits for rank 1, which hears of that instead of waiting for rank 0."""
    store, _, _ = next(dist.rendezvous("env://", rank, world))
    if rank == 1:
        store.get("sent")
        with pytest.raises(dist.DistBackendError, match=r"rank 0 \(host .* was interrupted"):
            dist.init_process_group("ours", store=store, rank=rank, world_size=world)
        return 0.0
    with signal_in_a_wait(signal.SIGINT, delay=0.2) as sent, pytest.raises(KeyboardInterrupt):
        dist.init_process_group("ours", store=store, rank=rank, world_size=world)
    store.set("sent", str(sent[0]))
    return time.time() - sent[0]


def test_an_interrupt_ends_the_making_of_a_group(played_nodes):
    check_soon(0.5, lambda: run_ranks(2, interrupted_joining, backend=None, nodes=played_nodes)[0])
