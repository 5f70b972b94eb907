"""What several test files ask of a group, of torch, and of the threads of their own process."""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import errno
import inspect
import os
import signal
import socket
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.algorithms.ddp_comm_hooks import quantization_hooks

import ourddp._C as core

HAS_HOOKS = hasattr(dist.ProcessGroup, "register_abort_hook")  # from torch 2.15 on
HAS_SPLIT_WITHOUT_DEVICE = "backend" in inspect.signature(dist.split_group).parameters  # from torch 2.15 on

BINDS_CPUS = "must be an accelerator" not in inspect.getsource(distributed_c10d._new_process_group_helper)
# Before, the hooks expected that an all-gather's future holds a list of lists, like NCCL's and unlike Gloo's.
QUANTISES_FOR_NCCL_ONLY = "fut.wait()[0]" in inspect.getsource(quantization_hooks)

HAS_BACKEND_OPTIONS = hasattr(core.ProcessGroupOurs, "options")  # of every backend from torch 2.15 on
HAS_WORK_EXCEPTION = "exception_ptr" not in (dist.Work.exception.__doc__ or "")  # not convertible before torch 2.15

FUTEX = {"x86_64": "202", "aarch64": "98"}.get(os.uname().machine)  # the number of the system call
EPOLL_WAIT = {"x86_64": "232", "aarch64": "22"}.get(os.uname().machine)


def backend_of(group: Any = None) -> Any:
    """Return the backend object of a group's CPU tensors; of the default group if none is given."""
    return (group or dist.group.WORLD)._get_backend(torch.device("cpu"))


def backend_over(store: dist.Store, world: int, rank: int = 0, seconds: float = 1) -> dist.Backend:
    """Make a backend as init_process_group() does, with this many seconds as its timeout."""
    options = distributed_c10d._DistributedBackendOptions()
    options.store = store
    options.group_rank, options.group_size = rank, world
    options.timeout = datetime.timedelta(seconds=seconds)
    return core.create_backend(options)


def failed_with(error: str, group: Any = None) -> bool:
    """Tell whether a group is in the state ``error``, a name in torch's ErrorType. SUCCESS: it has not failed.

    If this torch cannot ask backends for their error, only whether there is an error is compared.
    """
    backend = backend_of(group)
    if bool(backend.failure()) != (error != "SUCCESS"):
        return False
    return not hasattr(backend, "get_error") or backend.get_error().name == error


def total(group: Any = None, value: float = 1.0) -> float:
    """Return the sum of the members' ``value``, by an all-reduce."""
    tensor = torch.full((5,), value)
    dist.all_reduce(tensor, group=group)
    assert tensor.eq(tensor[0]).all()
    return tensor[0].item()


# --- connections -----------------------------------------------------------------------------------------------------


def tcp_connections() -> list[socket.socket]:
    """Return this process's TCP connections, as sockets of their own."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # gone since, or not connected
            if stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                connection = socket.socket(fileno=os.dup(int(name)))
                is_tcp = connection.family != socket.AF_UNIX and connection.type == socket.SOCK_STREAM
                if is_tcp and connection.getpeername():
                    found.append(connection)
    return found


def is_to_store(connection: socket.socket) -> bool:
    """Tell whether the connection is that to the store of the job."""
    return connection.getpeername()[1] == int(os.environ["MASTER_PORT"])


# --- threads ---------------------------------------------------------------------------------------------------------


def threads_named(name: str) -> list[int]:
    """Return the ids of the threads of this process that have this name."""
    found = []
    for task in Path("/proc/self/task").iterdir():
        try:
            if (task / "comm").read_text().strip() == name:
                found.append(int(task.name))
        except OSError:  # it has ended
            continue
    return found


def _futex_of(thread: int) -> int | None:
    """Return the address on which a thread sleeps in a futex; None if it does not."""
    number, *arguments = Path(f"/proc/self/task/{thread}/syscall").read_text().split()
    if number != FUTEX:
        return None
    return int(arguments[0], 16)


def _file_mapped_at(address: int) -> str:
    """Return the name of the file that is mapped at ``address``; empty if there is none."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        bounds, *_, name = line.split(maxsplit=5) if line.count(" ") > 5 else (line.split()[0], "")
        begin, end = (int(bound, 16) for bound in bounds.split("-"))
        if begin <= address < end:
            return name
    return ""


def _is_group_memory(address: int) -> bool:
    return "/memfd:ours" in _file_mapped_at(address)


def _watches_connections(thread: int) -> bool:
    """Tell whether a thread sleeps until something arrives on one of several connections."""
    number, *arguments = Path(f"/proc/self/task/{thread}/syscall").read_text().split()
    return number == EPOLL_WAIT and int(arguments[3], 16) != 0


def waits_for_peers(thread: int) -> bool:
    """Tell whether a thread of this process sleeps on a futex that it shares with other ranks, or on connections."""
    if _watches_connections(thread):
        return True
    futex = _futex_of(thread)
    return futex is not None and _is_group_memory(futex)


def waits_for_another_thread(thread: int) -> bool:
    """Tell whether a thread sleeps on a futex of this process alone.

    A thread that waits for the GIL does not count: the caller holds it, and releases it between two looks.
    """
    futex = _futex_of(thread)
    time.sleep(0.02)
    return futex is not None and _futex_of(thread) == futex and not _is_group_memory(futex)


def killed_in_the_middle(rank: int, world: int, victim: int, elements: int, calls: int) -> tuple[str, float]:
    """All-reduce ``elements`` numbers repeatedly; rank ``victim`` is killed after ``calls`` calls.

    Return a survivor's error, and the seconds from the death to the error.
    """
    store = dist.distributed_c10d._get_default_store()
    tensor = torch.ones(elements)
    for i in range(calls + 200):
        if i == calls and rank == victim:
            store.set("died at", str(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            dist.all_reduce(tensor.fill_(1))
        except dist.DistNetworkError as error:
            return str(error), time.time() - float(store.get("died at"))
    raise AssertionError("nobody noticed")


def refused_to_join(rank: int, world: int) -> tuple[str, float]:
    """Return the error of joining a group, and the seconds that it took."""
    start = time.monotonic()
    with pytest.raises(dist.DistBackendError) as error:
        dist.init_process_group("ours", timeout=datetime.timedelta(seconds=30))
    return str(error.value), time.monotonic() - start


def is_running(pid: int) -> bool:
    """Tell whether there is a process of that number, and it has not ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def reached(state: Callable[[], bool], seconds: float = 20) -> bool:
    """Wait until ``state()`` is true. Return False if that takes more than ``seconds``."""
    deadline = time.monotonic() + seconds
    while not state():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.001)
    return True


# --- output ----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def errors_written() -> Iterator[Callable[[], str]]:
    """Catch what this process writes to stderr. Yield a function that returns it after the end of the block."""
    with tempfile.TemporaryFile() as file:
        before = os.dup(2)
        os.dup2(file.fileno(), 2)
        texts: list[str] = []
        try:
            yield lambda: texts[0]
        finally:
            os.dup2(before, 2)
            os.close(before)
            file.seek(0)
            texts.append(file.read().decode())


# --- system calls ----------------------------------------------------------------------------------------------------

SYSTEM_CALLS = {"x86_64": {"memfd_create": 319, "pidfd_open": 434}, "aarch64": {"memfd_create": 279, "pidfd_open": 434}}


class _Rule(ctypes.Structure):
    _fields_ = [("code", ctypes.c_uint16), ("yes", ctypes.c_uint8), ("no", ctypes.c_uint8), ("value", ctypes.c_uint32)]


class _Filter(ctypes.Structure):
    _fields_ = [("length", ctypes.c_uint16), ("rules", ctypes.POINTER(_Rule))]


def forbid_calls(name: str, error: int = errno.ENOSYS, unless_flags: int = 0) -> None:
    """Let a system call fail with ``error`` in this process from now on, as if the kernel lacked or forbade it.

    With ``unless_flags``, a call whose second argument has all of these bits is allowed.
    """
    load, jump_if_equal, jump_if_set, stop = 0x20, 0x15, 0x45, 0x06
    argument = 16 + 8  # of struct seccomp_data
    allow, fail = 0x7FFF0000, 0x00050000 | error
    number = SYSTEM_CALLS[os.uname().machine][name]
    rules = [_Rule(load, 0, 0, 0), _Rule(jump_if_equal, 0, 3 if unless_flags else 1, number)]
    if unless_flags:
        rules += [_Rule(load, 0, 0, argument), _Rule(jump_if_set, 1, 0, unless_flags)]
    rules += [_Rule(stop, 0, 0, fail), _Rule(stop, 0, 0, allow)]
    libc = ctypes.CDLL(None, use_errno=True)
    program = _Filter(len(rules), (_Rule * len(rules))(*rules))
    assert libc.prctl(38, 1, 0, 0, 0) == 0  # PR_SET_NO_NEW_PRIVS
    assert libc.prctl(22, 2, ctypes.byref(program), 0, 0) == 0, os.strerror(ctypes.get_errno())  # PR_SET_SECCOMP


def bytes_in_heap(name: str = "ours_heap") -> int:
    """Return the bytes of memory that this process and its peers have taken from the heaps that are mapped here.

    Another ``name`` selects other shared files that this process has open by the beginning of their names. Those of
    groups are closed once they are mapped.
    """
    inodes = {}
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            if f"memfd:{name}" in os.readlink(entry):
                info = os.stat(entry)
                inodes[info.st_ino] = info.st_blocks * 512
    return sum(inodes.values())


def in_heap(tensor: torch.Tensor) -> bool:
    """Tell whether the tensor's memory is mapped from a heap."""
    return "/memfd:ours_heap" in _file_mapped_at(tensor.data_ptr())
