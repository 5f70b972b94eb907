"""What several test files ask of a group, of this torch, and of the threads of their own process."""

from __future__ import annotations

import contextlib
import datetime
import inspect
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ourddp._C as core

HAS_HOOKS = hasattr(dist.ProcessGroup, "register_abort_hook")  # from torch 2.15 on
HAS_SPLIT_WITHOUT_DEVICE = "backend" in inspect.signature(dist.split_group).parameters  # from torch 2.15 on

HAS_BACKEND_OPTIONS = hasattr(core.ProcessGroupOurs, "options")  # of every backend from torch 2.15 on
HAS_WORK_EXCEPTION = "exception_ptr" not in (dist.Work.exception.__doc__ or "")  # not convertible before torch 2.15

FUTEX = {"x86_64": "202", "aarch64": "98"}.get(os.uname().machine)  # the number of the system call
EPOLL_WAIT = {"x86_64": "232", "aarch64": "22"}.get(os.uname().machine)


def backend_of(group: Any = None) -> Any:
    """Return the backend object behind a group's CPU tensors; without a group, the default one's."""
    return (group or dist.group.WORLD)._get_backend(torch.device("cpu"))


def failed_with(error: str, group: Any = None) -> bool:
    """Tell whether a group is in the state ``error``, a name of torch's ErrorType; SUCCESS: it has not failed.

    Where this torch does not ask backends for their error, only that there is one or none is compared.
    """
    backend = backend_of(group)
    if bool(backend.failure()) != (error != "SUCCESS"):
        return False
    return not hasattr(backend, "get_error") or backend.get_error().name == error


def total(group: Any = None, value: float = 1.0) -> float:
    """Return the sum of what the members of a group give as ``value``, by an all-reduce."""
    tensor = torch.full((5,), value)
    dist.all_reduce(tensor, group=group)
    assert tensor.eq(tensor[0]).all()
    return tensor[0].item()


# --- threads ---------------------------------------------------------------------------------------------------------


def threads_named(name: str) -> list[int]:
    """Return the ids of this process's threads of that name."""
    found = []
    for task in Path("/proc/self/task").iterdir():
        try:
            if (task / "comm").read_text().strip() == name:
                found.append(int(task.name))
        except OSError:  # it has ended
            continue
    return found


def _futex_of(thread: int) -> tuple[int, bool] | None:
    """Return the address that a thread sleeps on and whether for a limited time; None where it does not sleep so."""
    number, *arguments = Path(f"/proc/self/task/{thread}/syscall").read_text().split()
    if number != FUTEX:
        return None
    return int(arguments[0], 16), int(arguments[3], 16) != 0


def _file_mapped_at(address: int) -> str:
    """Return the name of what is mapped at ``address``; empty where that is no file, or nothing."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        bounds, *_, name = line.split(maxsplit=5) if line.count(" ") > 5 else (line.split()[0], "")
        begin, end = (int(bound, 16) for bound in bounds.split("-"))
        if begin <= address < end:
            return name
    return ""


def _is_group_memory(address: int) -> bool:
    return "/memfd:ours" in _file_mapped_at(address)


def _watches_connections(thread: int) -> bool:
    """Tell whether a thread sleeps until something arrives on one of many connections."""
    number, *arguments = Path(f"/proc/self/task/{thread}/syscall").read_text().split()
    return number == EPOLL_WAIT and int(arguments[3], 16) != 0


def waits_for_peers(thread: int) -> bool:
    """Tell whether a thread of this process sleeps on a word that it shares with other ranks, or on connections."""
    if _watches_connections(thread):
        return True
    futex = _futex_of(thread)
    return futex is not None and _is_group_memory(futex[0])


def waits_for_another_thread(thread: int) -> bool:
    """Tell whether a thread sleeps on a word of this process for as long as it takes.

    Python's own lock is waited for a few milliseconds at a time, so who waits for that does not count.
    """
    futex = _futex_of(thread)
    return futex is not None and not futex[1] and not _is_group_memory(futex[0])


def killed_in_the_middle(rank: int, world: int, victim: int, elements: int, calls: int) -> tuple[str, float]:
    """Reduce ``elements`` numbers until rank ``victim`` is killed, after so many calls.

    Return a survivor's error, and the seconds from the death to it.
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


def reached(state: Callable[[], bool], seconds: float = 20) -> bool:
    """Look until ``state()`` is true, and return True; False where it is not within ``seconds``."""
    deadline = time.monotonic() + seconds
    while not state():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.001)
    return True


def bytes_in_heap(name: str = "ours_heap") -> int:
    """Return how much memory this process and its peers have taken from heaps that are mapped here, in bytes.

    With another name, from the files of that beginning that the ranks share; "ours" has all.
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
