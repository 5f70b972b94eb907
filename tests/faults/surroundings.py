"""Processes that lack something: what a rank does to its own surroundings before it joins a group."""

from __future__ import annotations

import ctypes
import os
import resource
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from probes import forbid_calls

NONE = "as usual"
_CLONE_NEWNS = 0x00020000
_MS_REC_PRIVATE = 0x4000 | (1 << 18)


@dataclass(frozen=True)
class Surroundings:
    """What a process lacks, and whether its ranks may refuse to work, provided that all say why."""

    enter: Callable[[], object]
    needs_mounts: bool = False
    may_refuse: bool = False


def _mount_over(folder: str, options: str) -> None:
    """Mount an empty file system of memory over ``folder``, for this process alone."""
    libc = ctypes.CDLL(None, use_errno=True)
    steps = (
        lambda: libc.unshare(_CLONE_NEWNS),
        lambda: libc.mount(None, b"/", None, _MS_REC_PRIVATE, None),
        lambda: libc.mount(b"tmpfs", folder.encode(), b"tmpfs", 0, options.encode()),
    )
    for step in steps:
        if step() != 0:
            raise OSError(ctypes.get_errno(), f"cannot mount over {folder}")


def _fill_dev_shm() -> None:
    _mount_over("/dev/shm", "size=64k")
    with Path("/dev/shm/filled").open("wb", buffering=0) as file:
        try:
            while file.write(bytes(4096)):
                pass
        except OSError:
            return


def _few_descriptors() -> None:
    """Leave too few descriptors for what ranks on other nodes need, but enough for what a program opens."""
    most = len(os.listdir("/proc/self/fd")) + 16
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


SURROUNDINGS = {
    NONE: Surroundings(lambda: None),
    "full /dev/shm": Surroundings(_fill_dev_shm, needs_mounts=True),
    "no /proc": Surroundings(lambda: _mount_over("/proc", "size=64k"), needs_mounts=True),
    "no locked memory": Surroundings(lambda: resource.setrlimit(resource.RLIMIT_MEMLOCK, (0, 0))),
    "few descriptors": Surroundings(_few_descriptors, may_refuse=True),
    "no pidfd_open": Surroundings(lambda: forbid_calls("pidfd_open")),
}


def why_no_mounts() -> str:
    """Return why file systems cannot be mounted here; empty if they can."""
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", "mount -t tmpfs tmpfs /dev/shm"], capture_output=True, text=True, check=False
    )
    return "" if done.returncode == 0 else f"file systems cannot be mounted here: {done.stderr.strip()}"
