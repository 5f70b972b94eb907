"""Processes that lack something: what a rank does to its own surroundings before it joins a group."""

from __future__ import annotations

import ctypes
import os
import resource
import subprocess
from collections.abc import Callable
from pathlib import Path

import torch
from probes import forbid_calls

NONE = "as usual"
_CLONE_NEWNS = 0x00020000
_MS_REC_PRIVATE = 0x4000 | (1 << 18)


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


def _hide_proc() -> None:
    torch.ones(1).half().add(1)  # torch itself reads /proc/cpuinfo once, and fails without it
    _mount_over("/proc", "size=64k")


def _few_descriptors() -> None:
    """Leave too few descriptors for what ranks on other nodes need, but enough for what a program opens."""
    most = len(os.listdir("/proc/self/fd")) + 16
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


SURROUNDINGS: dict[str, Callable[[], object]] = {
    NONE: lambda: None,
    "full /dev/shm": _fill_dev_shm,
    "no /proc": _hide_proc,
    "no locked memory": lambda: resource.setrlimit(resource.RLIMIT_MEMLOCK, (0, 0)),
    "few descriptors": _few_descriptors,
    "no pidfd_open": lambda: forbid_calls("pidfd_open"),
}


def why_no_mounts() -> str:
    """Return why file systems cannot be mounted here; empty if they can."""
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", "mount -t tmpfs tmpfs /dev/shm"], capture_output=True, text=True, check=False
    )
    return "" if done.returncode == 0 else f"file systems cannot be mounted here: {done.stderr.strip()}"
