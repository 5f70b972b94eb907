"""A signal at one rank ends the training of all ranks in the same step, without a collective of its own."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from programs import ROOT, run_python
from ranks import in_ranks
from torch import nn

import ourddp
from ourddp import preemption

STEPS = 40


@contextlib.contextmanager
def fresh_group(backend: str = "ours") -> Iterator[dist.ProcessGroup]:
    """Yield a group that has heard of no signal, in a process that was sent none."""
    group = dist.new_group(backend=backend)
    try:
        yield group
    finally:
        preemption._forget()
        dist.barrier()
        dist.destroy_process_group(group)


def stops_at(group: dist.ProcessGroup, step_of_signal: int, told: bool, step) -> int:
    """Run steps until all ranks are preempted; return in which one they were. This rank gets the signal if `told`."""
    for number in range(STEPS):
        if told and number == step_of_signal:
            os.kill(os.getpid(), signal.SIGTERM)
        step(number)
        if ourddp.preempted(group):
            return number
    raise AssertionError("never preempted")


def assert_same_step(group: dist.ProcessGroup, rank: int, told: int, step) -> None:
    ourddp.watch_preemption()
    steps: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(steps, stops_at(group, 5 + told, rank == told, step))
    assert set(steps) == {5 + told}
    assert ourddp.preempted(group)  # it stays true


@in_ranks(4, "nodes")
def test_all_ranks_stop_in_the_same_step(rank, world):
    for told in range(world):
        for size in (1, 5000, 300_000):  # other algorithms
            with fresh_group() as group:
                data = torch.ones(size)
                assert_same_step(group, rank, told, lambda _, d=data, g=group: dist.all_reduce(d, group=g))
        with fresh_group() as group:
            assert_same_step(group, rank, told, lambda _, g=group: dist.barrier(g))


@in_ranks(3)
def test_asynchronous_reductions_that_are_under_way_count(rank, world):
    works: list[dist.Work] = []
    with fresh_group() as group:

        def step(_: int) -> None:
            works.append(dist.all_reduce(torch.ones(1000), group=group, async_op=True))

        assert_same_step(group, rank, 1, step)
        for work in works:
            work.wait()


DDP_CASES = {
    "plain": {},
    "static graph": {"static_graph": True},
    "unused parameters": {"find_unused_parameters": True},
}


@pytest.mark.parametrize("options", DDP_CASES.values(), ids=DDP_CASES)
@in_ranks(2, "nodes")
def test_gradients_carry_it_and_no_sync_does_not(rank, world, options):
    with fresh_group() as group:
        model = ourddp.DistributedDataParallel(nn.Linear(3, 2), process_group=group, **options)
        hooked = ourddp.DistributedDataParallel(nn.Linear(3, 2), process_group=group)
        hooked._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
        ourddp.watch_preemption()
        for ddp in (model, hooked):
            ddp(torch.ones(1, 3)).sum().backward()
        assert not ourddp.preempted(group)
        if rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        for _ in range(2):
            with model.no_sync():
                model(torch.ones(1, 3)).sum().backward()
            assert not ourddp.preempted(group)
        (model if options else hooked)(torch.ones(1, 3)).sum().backward()
        assert ourddp.preempted(group)


@in_ranks(2)
def test_a_rank_without_input_hears_of_it_in_join(rank, world):
    with fresh_group() as group:
        model = ourddp.DistributedDataParallel(nn.Linear(3, 2), process_group=group)
        ourddp.watch_preemption()
        with model.join():
            for step in range(1 + 5 * rank):
                if rank == 1 and step == 3:
                    os.kill(os.getpid(), signal.SIGTERM)
                model(torch.ones(1, 3)).sum().backward()
                if ourddp.preempted(group):
                    assert step == 3
                    break
        assert ourddp.preempted(group)


@in_ranks(2)
def test_it_takes_no_collective(rank, world):
    counts = []
    for asks in (False, True):
        with fresh_group() as group:
            data = torch.ones(100)
            for _ in range(10):
                dist.all_reduce(data.fill_(1), group=group)
                assert not (asks and ourddp.preempted(group))
            counts.append(ourddp.stats(group).begun)
    assert counts == [10, 10]


@in_ranks(2)
def test_a_broadcast_does_not_carry_it_because_rank_0_would_not_hear(rank, world):
    with fresh_group() as group:
        ourddp.watch_preemption()
        if rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        dist.broadcast(torch.ones(3), 0, group=group)
        assert not ourddp.preempted(group)
        dist.all_reduce(torch.ones(3), group=group)
        assert ourddp.preempted(group)


@in_ranks(2)
def test_a_forked_child_does_not_wait_for_its_parents_calls(rank, world):
    with fresh_group() as group:
        ourddp.watch_preemption()
        if rank == 1:
            dist.barrier()
            dist.all_reduce(torch.ones(3), group=group)
            return
        work = dist.all_reduce(torch.ones(3), group=group, async_op=True)
        if (child := os.fork()) == 0:
            signal.alarm(10)  # ends a child that waits for the call
            try:
                ourddp.preempted(group)
            except RuntimeError:
                os._exit(3)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
        dist.barrier()
        work.wait()


@in_ranks(2)
def test_another_backend_is_refused(rank, world):
    with fresh_group("gloo") as group:
        before = signal.getsignal(signal.SIGTERM)
        with pytest.raises(ValueError, match="needs the backend 'ours'"):
            ourddp.preempted(group)
        assert signal.getsignal(signal.SIGTERM) is before


# --- signals, in processes of their own ------------------------------------------------------------------------------


def run(program: str) -> subprocess.CompletedProcess[str]:
    return run_python("import os, signal, threading\nimport ourddp\n" + program, ROOT)


def test_the_second_signal_does_what_it_did_before():
    ended = run(
        "signal.signal(signal.SIGUSR1, lambda *_: print('before'))\n"
        "ourddp.watch_preemption([signal.SIGTERM, signal.SIGUSR1])\n"
        "ourddp.watch_preemption([signal.SIGUSR1])  # changes nothing\n"
        "assert not ourddp.preempted()\n"
        "signal.raise_signal(signal.SIGUSR1)\n"
        "assert ourddp.preempted()\n"
        "signal.raise_signal(signal.SIGUSR1)\n"
        "signal.raise_signal(signal.SIGTERM)\n"
        "print('alive', flush=True)\n"
        "signal.raise_signal(signal.SIGTERM)\n"
    )
    assert ended.stdout == "before\nalive\n"
    assert ended.returncode == -signal.SIGTERM, ended.stderr


def test_signals_may_come_while_the_handler_is_being_set_or_runs():
    ended = run(
        "from types import SimpleNamespace\n"
        "from ourddp import preemption\n"
        "signal.signal(signal.SIGUSR1, lambda *_: print('before'))\n"
        "set_handler, native = signal.signal, preemption._C\n"
        "def set_and_send(number, handler):\n"
        "    before = set_handler(number, handler)\n"
        "    if handler is preemption._ask:\n"
        "        signal.raise_signal(number)\n"
        "    return before\n"
        "def request_and_send():\n"
        "    is_first = not native.stop_requested()\n"
        "    native.request_stop()\n"
        "    if is_first:\n"
        "        signal.raise_signal(signal.SIGUSR1)\n"
        "preemption._C = SimpleNamespace(**{**vars(native), 'request_stop': request_and_send})\n"
        "signal.signal = set_and_send\n"
        "ourddp.watch_preemption([signal.SIGUSR1])\n"
        "assert ourddp.preempted()\n"
        "signal.raise_signal(signal.SIGUSR1)\n"
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == "before\n"


def test_a_forked_child_dies_of_the_signal_and_asks_nobody_to_stop():
    ended = run(
        "assert not ourddp.preempted()\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    signal.raise_signal(signal.SIGTERM)\n"
        "    os._exit(0)\n"
        "assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM\n"
        "assert not ourddp.preempted()\n"
        "signal.raise_signal(signal.SIGTERM)\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    os._exit(ourddp._C.stop_requested())\n"
        "assert os.waitpid(child, 0)[1] == 0\n"
        "assert ourddp.preempted()\n"
    )
    assert ended.returncode == 0, ended.stderr


def test_workers_of_a_loader_end_with_their_loader():
    ended = run(
        "import torch\n"
        "from torch.utils.data import DataLoader, TensorDataset\n"
        "loader = DataLoader(TensorDataset(torch.arange(64)), 1, num_workers=2, persistent_workers=True)\n"
        "assert not ourddp.preempted()\n"
        "batches = iter(loader)\n"
        "next(batches)\n"
        "signal.raise_signal(signal.SIGTERM)\n"
        "assert ourddp.preempted()\n"
        "assert len(list(batches)) == 63  # the workers go on until the program lets them end\n"
        "worker = loader._iterator._workers[0]\n"
        "worker.terminate()\n"
        "worker.join(20)\n"
        "assert worker.exitcode is not None\n"
        "os._exit(0)\n"
    )
    assert ended.returncode == 0, ended.stderr


def test_mistakes_are_explained():
    with pytest.raises(ValueError, match="SIGKILL cannot be caught; choose SIGTERM or SIGUSR1"):
        ourddp.watch_preemption([signal.SIGKILL])
    ended = run(
        "def ask():\n"
        "    try:\n"
        "        ourddp.preempted()\n"
        "    except RuntimeError as error:\n"
        "        print(error)\n"
        "thread = threading.Thread(target=ask)\n"
        "thread.start()\n"
        "thread.join()\n"
    )
    assert ended.stdout == "call ourddp.watch_preemption() on the main thread, before the training\n"
