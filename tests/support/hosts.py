"""Hosts of their own on one machine: network namespaces, joined by links that can be taken down.

What is made here is removed again, unless a signal kills the program in between. It needs iproute2, and a user who may
make namespaces.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

_TIMEOUT_S = 20
_CLONE_NEWNET = 0x40000000
_CLONE_NEWUTS = 0x04000000
# What most machines use: the first that this one allows. Its own may be another, bbr say, which holds packets back by
# timers even where nothing is limited.
COMMON = ("cubic", "reno")


def _run(*command: str) -> None:
    """Raise CalledProcessError with what the command said if it fails."""
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=_TIMEOUT_S)


def _ip(*arguments: str) -> None:
    _run("ip", *arguments)


@dataclass(frozen=True)
class Host:
    """One network namespace, with one interface ``eth0`` beside its loopback."""

    name: str  # as its processes see it
    space: str  # the name of the namespace
    address: str
    congestion_control: str

    def enter(self) -> None:
        """Let this thread, and those that it starts, live there."""
        libc = ctypes.CDLL(None, use_errno=True)
        handle = os.open(f"/var/run/netns/{self.space}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            if libc.setns(handle, _CLONE_NEWNET) != 0 or libc.unshare(_CLONE_NEWUTS) != 0:
                raise OSError(ctypes.get_errno(), f"cannot enter the namespace {self.space}")
        finally:
            os.close(handle)
        socket.sethostname(self.name)

    def set_link(self, state: str) -> None:
        """Take the interface ``up`` or ``down``."""
        _ip("-n", self.space, "link", "set", "eth0", state)


def bytes_sent() -> int:
    """Return the bytes that have left through ``eth0`` of this thread's network, headers of packets included."""
    for line in Path("/proc/thread-self/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == "eth0":
            return int(numbers.split()[8])
    raise RuntimeError("this network has no eth0")


def why_no_hosts() -> str:
    """Return why hosts cannot be made here; empty where they can."""
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            return f"hosts of their own need the tool {tool} (iproute2)"
    space = f"ours-probe-{os.getpid()}"
    try:
        _ip("netns", "add", space)
    except (OSError, subprocess.SubprocessError) as error:
        return f"network namespaces cannot be made here: {getattr(error, 'stderr', error)}".strip()
    try:
        _ip("-n", space, "link", "add", "probe0", "type", "veth", "peer", "name", "probe1")
        _ip("-n", space, "link", "add", "probe2", "type", "bridge")
        _run(
            "tc",
            "-n",
            space,
            "qdisc",
            "add",
            "dev",
            "probe0",
            "root",
            "tbf",
            "rate",
            "1gbit",
            "burst",
            "1mb",
            "latency",
            "1s",
        )
    except (OSError, subprocess.SubprocessError) as error:
        return f"network links cannot be made here: {getattr(error, 'stderr', error)}".strip()
    finally:
        _ip("netns", "del", space)
    return ""


_networks = itertools.count()


def _choose_congestion_control(space: str, names: Sequence[str]) -> str:
    for name in names:
        with contextlib.suppress(subprocess.CalledProcessError):
            _ip("netns", "exec", space, "sh", "-c", f"echo {name} > /proc/sys/net/ipv4/tcp_congestion_control")
            return name
    return Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text().strip()


@dataclass(frozen=True)
class Queue:
    """What a host's link takes in beyond its rate, in the words of tc: at once, and for how long it is kept waiting."""

    burst: str = "256kb"
    latency: str = "20ms"


@contextlib.contextmanager
def linked_hosts(
    count: int, mbit: int = 0, queue: Queue = Queue(), congestion_controls: Sequence[str] = COMMON
) -> Iterator[list[Host]]:
    """Make ``count`` hosts on one network, 10.199.0.0/24, which nothing outside of them can reach.

    Each may send ``mbit`` Mbit/s, where it is not 0. Their congestion control is the first of those named that this
    machine allows, otherwise its own.
    """
    mark = f"ours-test-{os.getpid()}-{next(_networks)}"
    switch = f"{mark}-net"
    spaces = [f"{mark}-{i}" for i in range(count)]
    hosts = []
    try:
        _ip("netns", "add", switch)
        _ip("-n", switch, "link", "add", "bridge0", "type", "bridge")
        _ip("-n", switch, "link", "set", "bridge0", "up")
        for i, space in enumerate(spaces):
            _ip("netns", "add", space)
            host = Host(f"host{i}", space, f"10.199.0.{i + 1}", _choose_congestion_control(space, congestion_controls))
            hosts.append(host)
            _ip("-n", host.space, "link", "add", "eth0", "type", "veth", "peer", "name", f"port{i}", "netns", switch)
            _ip("-n", switch, "link", "set", f"port{i}", "master", "bridge0", "up")
            _ip("-n", host.space, "address", "add", f"{host.address}/24", "dev", "eth0")
            _ip("-n", host.space, "link", "set", "lo", "up")
            _ip("-n", host.space, "link", "set", "eth0", "up")
            if mbit:
                limit = ("tbf", "rate", f"{mbit}mbit", "burst", queue.burst, "latency", queue.latency)
                _run("tc", "-n", host.space, "qdisc", "add", "dev", "eth0", "root", *limit)
        yield hosts
    finally:
        for space in [*spaces, switch]:
            with contextlib.suppress(subprocess.SubprocessError):
                _ip("netns", "del", space)
