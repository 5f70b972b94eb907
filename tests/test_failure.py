"""What happens when things go wrong: dead and stalled peers, mismatches, abort, forks, exits."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from probes import backend_of, reached, threads_named, waits_for_another_thread, waits_for_peers
from ranks import run_ranks

ROOT = Path(__file__).resolve().parent.parent


# ---------------------------------------------------------------- peers that die or stall


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
                "error": backend_of().get_error().name,
                "failure": backend_of().failure(),
            }
    raise AssertionError("nobody noticed")


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize(("world", "victim"), [(2, 0), (2, 1), (4, 2)])
def test_a_killed_rank_is_named_on_every_survivor_within_a_second(world, victim, asynchronous):
    results = run_ranks(world, die_in_a_loop, victim, asynchronous, killed=[victim])
    for rank, result in enumerate(results):
        if rank == victim:
            continue
        assert re.search(rf"rank {victim} \(host [^ ]+, pid \d+\) died", result["text"]), result["text"]
        assert result["seconds"] < 1
        assert result["error"] == "REMOTE_ERROR"
        assert f"rank {victim}" in result["failure"]


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


def test_a_killed_sender_is_named():
    results = run_ranks(3, die_in_p2p, killed=[1])
    for text, seconds in (results[0], results[2]):
        assert "rank 1" in text
        assert seconds < 1.5


def stall(rank: int, world: int, call: str) -> tuple[str, float, str]:
    store = dist.distributed_c10d._get_default_store()
    store.set(f"pid {rank}", str(os.getpid()))
    dist.barrier()
    if rank == 1:
        store.get("may go on")
        return "", 0.0, ""
    start = time.monotonic()
    with pytest.raises(dist.DistBackendError) as error:
        if call == "recv":
            dist.recv(torch.empty(4), 1)
        else:
            dist.all_reduce(torch.ones(4))
    seconds = time.monotonic() - start
    name = backend_of().get_error().name
    if store.add("raised", 1) == world - 1:
        store.set("may go on", "")
    return str(error.value), seconds, name


@pytest.mark.parametrize("call", ["all_reduce", "recv"])
def test_an_absent_rank_is_named_at_the_timeout(call):
    results = run_ranks(3, stall, call, pg_timeout=2)
    for text, seconds, name in (results[0], results[2]):
        assert "rank 1" in text
        assert " Timed out waiting 2000ms" in text  # PyTorch's own words, which programs look for
        assert seconds < 3
        assert name == "TIMEOUT"
    assert min(seconds for _, seconds, _ in (results[0], results[2])) > 1.8


def stopped(rank: int, world: int, seconds: float) -> str:
    """Rank 0 stops rank 1 by SIGSTOP for ``seconds`` while the group's timeout is 3 s."""
    store = dist.distributed_c10d._get_default_store()
    store.set(f"pid {rank}", str(os.getpid()))
    dist.barrier()
    if rank == 0:
        pid = int(store.get("pid 1"))
        os.kill(pid, signal.SIGSTOP)
        threading.Timer(seconds, os.kill, (pid, signal.SIGCONT)).start()
    tensor = torch.ones(3)
    try:
        for _ in range(10):
            dist.all_reduce(tensor.fill_(1))
    except dist.DistBackendError as error:
        return str(error)
    assert tensor[0].item() == world
    return ""


def test_a_stopped_rank_that_comes_back_in_time_does_no_harm():
    assert run_ranks(3, stopped, 1.0, pg_timeout=3) == ["", "", ""]


def test_a_stopped_rank_is_named_at_the_timeout():
    texts = run_ranks(3, stopped, 4.0, pg_timeout=3)
    assert all("rank 1 (host" in text for text in texts), texts


# ---------------------------------------------------------------- ranks that call different things


def mismatch(rank: int, world: int, kind: str) -> tuple[str, float, str, str]:
    mine = rank == world - 1  # the last rank does otherwise
    tensor = torch.ones(6, dtype=torch.int32 if mine and kind == "dtype" else torch.float32)
    start = time.monotonic()
    with pytest.raises(dist.DistBackendError) as error:
        if kind == "op":
            dist.broadcast(tensor, 0) if mine else dist.all_reduce(tensor)
        elif kind == "root":
            dist.broadcast(tensor, 1 if mine else 0)
        elif kind == "count":
            dist.all_reduce(tensor[: 5 if mine else 6])
        elif kind == "reduce op":
            dist.all_reduce(tensor, dist.ReduceOp.MAX if mine else dist.ReduceOp.SUM)
        elif kind == "size of a gathered tensor":
            dist.all_gather([torch.empty(6) for _ in range(world)], tensor) if not mine else dist.all_gather(
                [torch.empty(7) for _ in range(world)], torch.ones(7)
            )
        else:
            dist.all_reduce(tensor)
    seconds = time.monotonic() - start
    if kind != "size of a gathered tensor":
        assert torch.equal(tensor, torch.ones_like(tensor)), "the input was written in spite of the error"
    with pytest.raises(dist.DistBackendError) as again:
        dist.barrier()
    return str(error.value), seconds, str(again.value), backend_of().get_error().name


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize(
    ("kind", "shown"),
    [
        ("op", ["broadcast", "all_reduce"]),
        ("root", ["root 0", "root 1"]),
        ("count", ["5 x float32", "6 x float32"]),
        ("dtype", ["6 x int32", "6 x float32"]),
        ("reduce op", ["MAX", "SUM"]),
        ("size of a gathered tensor", ["24", "28"]),
    ],
)
def test_a_mismatch_is_found_at_once_on_every_rank(world, kind, shown):
    for text, seconds, again, name in run_ranks(world, mismatch, kind):
        for word in shown:
            assert word in text
        assert f"rank {world - 1}" in text
        assert "rank 0" in text
        assert seconds < 1
        assert again == text, "the group does not stay failed with the same message"
        assert name == "COMM_ERROR"


def fails_alone_then_recovers(rank: int, world: int) -> float:
    """A failed group does not take its parent along, and a new one can be made."""
    first = dist.new_group()
    with pytest.raises(dist.DistBackendError):
        dist.all_reduce(torch.ones(1 + rank), group=first)
    second = dist.new_group()
    tensor = torch.ones(1)
    dist.all_reduce(tensor, group=second)
    dist.all_reduce(tensor)
    return tensor.item()


def test_other_groups_survive_a_failure():
    assert run_ranks(2, fails_alone_then_recovers) == [4, 4]


# ---------------------------------------------------------------- abort


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
        # The waiter itself runs what is queued, or the group's thread does and the waiter awaits that.
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
    assert waited == [True], "the call was never seen to wait, so its end tells nothing of the abort"
    assert backend_of().get_error().name == "COMM_ERROR"
    dist.barrier(group=gate)
    return ended_at - aborted_at[0], str(error.value)


@pytest.mark.parametrize("what", ["all_reduce", "queued", "recv"])
def test_abort_frees_every_waiter_within_100_ms(what):
    seconds, text = run_ranks(2, aborted, what)[0]
    assert 0 <= seconds < 0.1
    assert "rank 0" in text


def abort_all(rank: int, world: int) -> None:
    work = dist.all_reduce(torch.ones(4), async_op=True) if rank == 0 else None
    dist.distributed_c10d._abort_process_group()
    if work is not None:
        with pytest.raises(dist.DistBackendError):
            work.wait()


def test_torchs_abort_of_all_groups():
    run_ranks(2, abort_all)


# ---------------------------------------------------------------- forks and exits


def forked_child(rank: int, world: int) -> int:
    work = dist.all_reduce(torch.ones(1000), async_op=True)  # starts the comm thread
    work.wait()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            for call in (
                lambda: dist.all_reduce(torch.ones(1)),
                lambda: dist.send(torch.ones(1), 1 - rank),
                dist.barrier,
            ):
                with pytest.raises(RuntimeError, match="forked"):
                    call()
            dist.destroy_process_group()
            status = 0
        finally:
            os._exit(status)
    deadline = time.monotonic() + 20
    while (ended := os.waitpid(pid, os.WNOHANG))[0] == 0 and time.monotonic() < deadline:
        time.sleep(0.01)
    if ended[0] == 0:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        raise AssertionError("the forked child hangs")
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    assert tensor.item() == world
    return os.waitstatus_to_exitcode(ended[1])


def test_a_forked_child_is_harmless():
    assert run_ranks(2, forked_child) == [0, 0]


PROGRAM = """
import atexit, os, sys, threading, time
ended = []
atexit.register(lambda: print(time.time() - ended[0], flush=True))  # registered first, so it runs last
import torch, torch.distributed as dist, ourddp
dist.init_process_group("ours")
rank = dist.get_rank()
for _ in range(5):
    dist.all_reduce(torch.ones(10), async_op=True).wait()
dist.barrier()
{body}
ended.append(time.time())
"""


def run_program(tmp_path: Path, body: str, world: int = 2) -> list[tuple[int, str, float]]:
    """Start the program in ``world`` processes; return exit code, stderr and the seconds that its end took."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.format(body=textwrap.dedent(body)))
    store = dist.TCPStore("127.0.0.1", 0, world, is_master=True, wait_for_workers=False)
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "WORLD_SIZE": str(world),
        "OMP_NUM_THREADS": "1",
    }
    processes = [
        subprocess.Popen(
            [sys.executable, str(program)],
            env={**environment, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world)
    ]
    results = []
    try:
        for process in processes:
            out, err = process.communicate(timeout=120)
            results.append((process.returncode, err, float(out.split()[-1]) if out.strip() else 0.0))
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return results


EXITS = {
    "falls off the end": """
        group = dist.new_group()
        dist.barrier(group=group)
        works = [dist.all_reduce(torch.ones(10), async_op=True) for _ in range(3 if rank == 0 else 0)]
    """,
    "with a callback under way": """
        started = threading.Event()
        def slowly(future):
            started.set()
            time.sleep(0.2)
        future = dist.all_reduce(torch.ones(10), async_op=True).get_future().then(slowly)
        started.wait()
    """,
    "destroyed": "dist.destroy_process_group()",
    "with a receive that nobody awaits": """
        pending = dist.irecv(torch.zeros(4), 0) if rank == 1 else None
        dist.barrier()
    """,
    "with a callback in a group made by split": """
        whole = dist.distributed_c10d._get_default_group()
        try:
            part = whole.split_group([0, 1], group_name="part")
        except (RuntimeError, AttributeError):  # torch before 2.15 splits groups of accelerators only
            part = whole
        future = part.allreduce([torch.ones(4)]).get_future().then(lambda _: time.sleep(0.1))
        dist.barrier()
    """,
}


@pytest.mark.parametrize("end", EXITS)
def test_a_program_ends_quietly_and_at_once(tmp_path, end):
    for code, err, seconds in run_program(tmp_path, EXITS[end]):
        noise = [line for line in err.splitlines() if "destroy_process_group() was not called" not in line]
        assert (code, noise) == (0, [])
        assert seconds < 1


def drop_the_group_in_a_callback(rank: int, world: int) -> None:
    holder = [dist.new_group()]
    if rank == 0:
        dist.send(torch.ones(4), 1, group=holder[0])
        dist.barrier()
        return
    dropped = threading.Event()

    def drop(_: Any) -> None:
        dist.destroy_process_group(holder.pop())
        dropped.set()

    future = dist.irecv(torch.zeros(4), 0, group=holder[0]).get_future().then(drop)
    assert dropped.wait(30)
    future.wait()
    dist.barrier()


def test_a_callback_may_drop_the_group_of_its_own_receive():
    run_ranks(2, drop_the_group_in_a_callback)


def batch_after_an_exception(rank: int, world: int) -> None:
    call, tensor = (dist.isend, torch.ones(4)) if rank == 0 else (dist.irecv, torch.zeros(4))
    with pytest.raises((RuntimeError, ValueError)):
        dist.batch_isend_irecv([dist.P2POp(call, tensor.to_sparse(), 1 - rank)])
    for work in dist.batch_isend_irecv([dist.P2POp(call, tensor, 1 - rank)]):
        work.wait()
    assert tensor.tolist() == [1.0] * 4


def test_a_batch_that_an_exception_cut_short_leaves_no_trace():
    run_ranks(2, batch_after_an_exception)


def test_an_exception_of_one_rank_reaches_the_others(tmp_path):
    body = """
        if rank == 0:
            ended.append(time.time())
            raise SystemExit(3)
        try:
            dist.all_reduce(torch.ones(1))
        except dist.DistNetworkError as error:
            assert "rank 0" in str(error) and "left the group" in str(error), error
        else:
            raise AssertionError("nobody noticed")
    """
    (first, _, _), (second, err, _) = run_program(tmp_path, body)
    assert (first, second) == (3, 0), err


def test_dev_shm_is_left_as_it_was():
    before = set(os.listdir("/dev/shm"))
    run_ranks(3, die_in_a_loop, 1, True, killed=[1])
    ours = [name for name in set(os.listdir("/dev/shm")) - before if "ours" in name]
    assert ours == []
