"""Resets connections of another process."""

from __future__ import annotations

import ctypes
import errno
import os
import random
import socket
import struct
from pathlib import Path

_PIDFD_GETFD = 438  # on all architectures


def _taken(process: int, descriptor: int) -> socket.socket | None:
    """Return the socket that is ``descriptor`` in another process; None if that is no socket of the Internet."""
    libc = ctypes.CDLL(None, use_errno=True)
    own = libc.syscall(_PIDFD_GETFD, process, descriptor, 0)
    if own < 0:
        if ctypes.get_errno() == errno.EBADF:  # it has just been closed
            return None
        raise OSError(ctypes.get_errno(), "pidfd_getfd")
    try:
        found = socket.socket(fileno=own)
    except OSError:
        os.close(own)
        return None
    if found.family in (socket.AF_INET, socket.AF_INET6) and found.type == socket.SOCK_STREAM:
        return found
    found.close()
    return None


def _reset(connection: socket.socket) -> None:
    """Let the peer of a connection get a reset, which connect() to no address sends."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.connect(connection.fileno(), struct.pack("=H14x", socket.AF_UNSPEC), 16) != 0:
        raise OSError(ctypes.get_errno(), "cannot reset a connection")


def reset_one(pid: int, except_port: int, rng: random.Random) -> bool:
    """Reset one connection of the process ``pid``, but none to the port ``except_port``. Return whether it has one."""
    process = os.pidfd_open(pid)
    try:
        descriptors = [int(name) for name in os.listdir(f"/proc/{pid}/fd")]
        rng.shuffle(descriptors)
        for descriptor in descriptors:
            found = _taken(process, descriptor)
            if found is None:
                continue
            with found:
                try:
                    port = found.getpeername()[1]
                except OSError:  # it listens
                    continue
                if port != except_port:
                    _reset(found)
                    return True
        return False
    finally:
        os.close(process)


def why_no_reset() -> str:
    """Return why connections cannot be reset here; empty if they can."""
    try:
        process = os.pidfd_open(os.getpid())
    except OSError as error:
        return f"this kernel has no pidfd_open: {error}"
    with socket.create_server(("127.0.0.1", 0)) as server:
        try:
            taken = _taken(process, server.fileno())
        except OSError as error:
            return f"descriptors of other processes cannot be taken here: {error}"
        finally:
            os.close(process)
        assert taken is not None
        taken.close()
    scope = Path("/proc/sys/kernel/yama/ptrace_scope")
    if os.geteuid() != 0 and scope.exists() and scope.read_text().strip() != "0":
        return "descriptors of other processes cannot be taken here, since ptrace is restricted"
    return ""
