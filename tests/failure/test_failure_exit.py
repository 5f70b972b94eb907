"""Forks, programs that end while operations are under way, and groups that are dropped then."""

from __future__ import annotations

import os
import signal
import textwrap
import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
from patience import check_soon
from probes import HAS_HOOKS, reached
from programs import ROOT, job, run_programs
from ranks import in_ranks, node_ids

# --- forks -----------------------------------------------------------------------------------------------------------


def exit_code_of(pid: int) -> int:
    ended = (0, 0)

    def has_ended() -> bool:
        nonlocal ended
        ended = os.waitpid(pid, os.WNOHANG)
        return ended[0] != 0

    if not reached(has_ended):
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        raise AssertionError("the forked child hangs")
    return os.waitstatus_to_exitcode(ended[1])


@in_ranks(2, "nodes", fresh=True)
def test_a_forked_child_does_no_harm(rank: int, world: int) -> None:
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
    code = exit_code_of(pid)
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    assert tensor.item() == world
    assert code == 0


@in_ranks(2, fresh=True)
def test_a_forked_child_leaves_alone_what_its_parent_has_begun(rank: int, world: int) -> None:
    store = dist.distributed_c10d._get_default_store()
    tensor = torch.ones(100)
    if rank == 1:
        store.wait(["forked"])
    work = dist.all_reduce(tensor, async_op=True)
    if rank == 0:
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                assert not work.is_completed()
                with pytest.raises(RuntimeError, match="forked"):
                    work.wait()
                status = 0
            finally:
                os._exit(status)
        try:
            assert exit_code_of(pid) == 0
        finally:
            store.set("forked", "")
    work.wait()
    assert tensor.eq(world).all()


@in_ranks(2, "nodes", fresh=True)
def test_a_forked_child_leaves_alone_its_parents_messages(rank: int, world: int) -> None:
    store = dist.distributed_c10d._get_default_store()
    if rank == 1:
        store.wait(["forked"])
        dist.send(torch.ones(100), 0)
        return
    tensor = torch.zeros(100)
    work = dist.irecv(tensor, 1)
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            with pytest.raises(RuntimeError, match="forked"):
                work.wait()
            status = 0
        finally:
            os._exit(status)
    store.set("forked", "")
    assert exit_code_of(pid) == 0
    work.wait()
    assert tensor.eq(1).all()


# --- ends of programs ------------------------------------------------------------------------------------------------


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


def run_program(body: str, nodes: int = 1, **env: str) -> list[tuple[int, str, float]]:
    """Run the program in two processes. Return each exit code, stderr, and the seconds that its end took."""
    store = dist.TCPStore("127.0.0.1", 0, 2, is_master=True, wait_for_workers=False)
    each = [{**rank, **node, **env} for rank, node in zip(job(2, store), node_ids(2, nodes), strict=True)]
    done = run_programs(PROGRAM.format(body=textwrap.dedent(body)), each, whole_end=True)
    return [(one.returncode, one.stderr, float(one.stdout.split()[-1]) if one.stdout else 0.0) for one in done]


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
        started = threading.Event()
        def slowly(future):
            started.set()
            time.sleep(0.1)
        future = part.allreduce([torch.ones(4)]).get_future().then(slowly)
        started.wait()
    """,
}


@pytest.mark.parametrize("end", EXITS)
def test_a_program_ends_quietly_and_at_once(end, played_nodes):
    def attempt() -> float:
        results = run_program(EXITS[end], played_nodes)
        for code, err, _ in results:
            noise = [line for line in err.splitlines() if "destroy_process_group() was not called" not in line]
            assert (code, noise) == (0, [])
        return max(seconds for _, _, seconds in results)

    check_soon(1, attempt)


def test_the_peers_notice_that_a_rank_ends_with_an_exception(played_nodes):
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
    (first, _, _), (second, err, _) = run_program(body, played_nodes)
    assert (first, second) == (3, 0), err


@pytest.mark.skipif(not HAS_HOOKS, reason="torch has abort hooks from 2.15 on")
def test_a_program_ends_after_the_abort_hooks_of_a_group_that_is_gone():
    """Otherwise a hook would need the GIL while Python ends, which crashes the process now and then."""
    body = """
        group = dist.new_group()
        def slowly():
            time.sleep(1)
            print("hooked", file=sys.stderr, flush=True)
        group._get_backend(torch.device("cpu")).register_abort_hook(1, slowly)
        dist.barrier()
        try:
            dist.all_reduce(torch.ones(1 + rank), group=group)
        except RuntimeError:
            dist.destroy_process_group(group)
            del group
        else:
            raise AssertionError("the ranks' sizes differ")
    """
    assert [(code, "hooked" in err) for code, err, _ in run_program(body)] == [(0, True)] * 2


DEVICE = f"""
        sys.path.insert(0, {str(ROOT / "tests" / "support")!r})
        import device_type
        from device_cases import here
        if {{kind!r}} == device_type.NAME:
            device_type.load()
        group = dist.new_group(backend="cpu:ours,{{kind}}:ours")
        device = here({{kind!r}})
        x = torch.ones(1 << 20, device=device)
        dist.all_reduce(x, group=group)
        assert x.cpu().eq(2).all()
        dist.barrier(group=group)
        if rank == 1:
            time.sleep(0.3)  # the other rank's end does not wait for this
"""

LAST_ACTS = {
    "all_reduce": """
        dist.all_reduce(x, group=group)
        if rank == 1:
            assert x.cpu().eq(4).all()
    """,
    "send": """
        if rank == 0:
            dist.send(x, 1, group=group)
        else:
            dist.recv(x.zero_(), 0, group=group)
            assert x.cpu().eq(2).all()
    """,
}


@pytest.mark.parametrize("act", LAST_ACTS)
def test_a_program_ends_after_its_device_has_taken_part(act, kind):
    body = DEVICE.format(kind=kind) + LAST_ACTS[act]
    assert [(code, err) for code, err, _ in run_program(body) if code != 0] == []


# --- ends of groups --------------------------------------------------------------------------------------------------


@in_ranks(2, "nodes", fresh=True)
def test_a_callback_may_destroy_the_group_of_its_own_receive(rank: int, world: int) -> None:
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


@in_ranks(3, "nodes")
def test_a_group_may_be_destroyed_before_its_messages_have_come(rank: int, world: int) -> None:
    """They end with an error at the rank that destroys it, and its peers still reach each other."""
    group = dist.new_group()
    dist.barrier(group=group)
    if rank == 2:
        pending = dist.irecv(torch.zeros(4), 0, group=group)
        dist.destroy_process_group(group)
        with pytest.raises(RuntimeError):
            pending.wait()
    dist.barrier()
    x = torch.full((4,), float(rank))
    if rank == 0:
        dist.send(x, 1, group=group)
    elif rank == 1:
        dist.recv(x, 0, group=group)
        assert x.eq(0).all()
