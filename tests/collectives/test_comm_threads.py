"""The communication threads' share of the cores: which cores they use, and with which priority."""

from __future__ import annotations

import ctypes
import os
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from probes import errors_written, reached, threads_named
from ranks import run_ranks

CAP_SYS_NICE = 23


def _niceness(thread):
    stat = Path(f"/proc/self/task/{thread}/stat").read_text()
    return int(stat.rpartition(")")[2].split()[16])  # the name in parentheses before it may contain spaces


def _drop_the_right_to_lower_niceness():
    """Take CAP_SYS_NICE from the calling thread and from those that it starts."""
    libc = ctypes.CDLL(None, use_errno=True)
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    sets = (ctypes.c_uint32 * 6)()  # effective, permitted and inheritable, each twice 32 bits
    assert libc.capget(header, sets) == 0
    sets[0] &= ~(1 << CAP_SYS_NICE)
    assert libc.capset(header, sets) == 0


def _communicate(rank, world):
    """Return the niceness of the communication threads, relative to this thread, and the cores of each."""
    own = _niceness(threading.get_native_id())
    dist.init_process_group("ours")
    work = dist.all_reduce(torch.ones(1 << 20), async_op=True)
    assert reached(work.is_completed)  # a thread in wait() might run it, and this thread a shorter one
    assert _niceness(threading.get_native_id()) == _niceness(os.getpid()) == own
    threads = threads_named("ours_comm")
    return [_niceness(thread) - own for thread in threads], [os.sched_getaffinity(thread) for thread in threads]


def _communicate_unprivileged(rank, world):
    _drop_the_right_to_lower_niceness()
    with errors_written() as errors:
        niceness, _ = _communicate(rank, world)
    return niceness, errors()


@pytest.mark.parametrize("niceness", [0, 3])
def test_communication_threads_can_be_nicer(niceness):
    for found, _ in run_ranks(2, _communicate, backend=None, env={"OURS_COMM_NICE": str(niceness)}):
        assert found, "there is no communication thread"
        assert set(found) == {niceness}


def test_niceness_that_is_not_permitted_is_reported():
    if os.getpriority(os.PRIO_PROCESS, 0) < 0:
        pytest.skip("this process may lower its niceness")
    for found, printed in run_ranks(2, _communicate_unprivileged, backend=None, env={"OURS_COMM_NICE": "-7"}):
        assert found
        assert set(found) == {0}
        assert printed.count("OURS_COMM_NICE=-7 asks for a niceness of") == 1, printed
        assert "communication threads stay at" in printed
        assert "CAP_SYS_NICE" in printed


def test_communication_threads_stay_on_their_cores():
    core = min(os.sched_getaffinity(0))
    for _, cores in run_ranks(2, _communicate, backend=None, env={"OURS_COMM_THREAD_AFFINITY": str(core)}):
        assert cores
        assert all(allowed == {core} for allowed in cores)
