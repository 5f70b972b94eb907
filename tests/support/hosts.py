"""Makes hosts on one machine: network namespaces, joined by links that can be taken down.

What it makes is removed again, unless a signal kills the program before. It needs iproute2, and a user who may make
namespaces.
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
# The congestion controls that most machines use. The machine's own may be bbr, for instance, which delays packets by
# timers even if nothing limits the rate.
COMMON = ("cubic", "reno")
HEADERS = 14 + 20 + 32  # bytes of a packet: of Ethernet, IPv4, and TCP with time stamps


def _run(*command: str) -> None:
    """Run a command. Raise CalledProcessError, with its output, if it fails."""
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=_TIMEOUT_S)


def _ip(*arguments: str) -> None:
    _run("ip", *arguments)


@dataclass(frozen=True)
class Host:
    """A network namespace with an interface ``eth0``, or several, beside its loopback."""

    name: str  # the host name for its processes
    space: str  # the name of the namespace
    address: str
    congestion_control: str
    switch: str  # the namespace in which its links end

    def enter(self) -> None:
        """Move this thread, and the threads that it starts, into this host."""
        libc = ctypes.CDLL(None, use_errno=True)
        handle = os.open(f"/var/run/netns/{self.space}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            if libc.setns(handle, _CLONE_NEWNET) != 0 or libc.unshare(_CLONE_NEWUTS) != 0:
                raise OSError(ctypes.get_errno(), f"cannot enter the namespace {self.space}")
        finally:
            os.close(handle)
        socket.sethostname(self.name)

    def set_link(self, state: str, interface: str = "eth0") -> None:
        """Take an interface ``up`` or ``down``."""
        _ip("-n", self.space, "link", "set", interface, state)

    def unplug(self, interface: str) -> None:
        """Cut the link of an interface, which stays up."""
        port = f"port{self.name.removeprefix('host')}-{interface.removeprefix('eth')}"
        _ip("-n", self.switch, "link", "set", port, "down")

    def lose(self, percent: float) -> None:
        """Drop each packet that leaves through ``eth0`` with this probability.

        A filter does it that loads a random number. Many kernels have that, but lack the discipline netem.
        """
        shot, ok, random = 2, 0, 0xFFFFF038
        steps = [f"32 0 0 {random}", f"53 0 1 {int(percent / 100 * 2**32)}", f"6 0 0 {ok}", f"6 0 0 {shot}"]
        _run("tc", "-n", self.space, "qdisc", "add", "dev", "eth0", "clsact")
        program = ["bpf", "direct-action", "bytecode", f"{len(steps)},{','.join(steps)}"]
        _run("tc", "-n", self.space, "filter", "add", "dev", "eth0", "egress", *program)

    def end_loss(self) -> None:
        """Drop no packets any more."""
        _run("tc", "-n", self.space, "qdisc", "del", "dev", "eth0", "clsact")


def bytes_sent(interface: str = "eth0") -> int:
    """Return the bytes that have left through an interface of this thread's network, including packet headers."""
    return _sent(interface)[0]


def payload_sent() -> int:
    """Return the same without the headers, of which acknowledgements, as many as the system likes, consist."""
    sent, packets = _sent()
    return sent - packets * HEADERS


def _sent(interface: str = "eth0") -> tuple[int, int]:
    """Return the bytes and the packets that have left."""
    for line in Path("/proc/thread-self/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == interface:
            return int(numbers.split()[8]), int(numbers.split()[9])
    raise RuntimeError(f"this network has no {interface}")


def why_no_hosts() -> str:
    """Return why hosts cannot be made here; empty if they can."""
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
    """The queue of a host's link, in the words of tc: the bytes at once, and how long packets may wait."""

    burst: str = "256kb"
    latency: str = "20ms"


@contextlib.contextmanager
def linked_hosts(
    count: int,
    mbit: int = 0,
    queue: Queue = Queue(),
    congestion_controls: Sequence[str] = COMMON,
    links: int = 1,
) -> Iterator[list[Host]]:
    """Make ``count`` hosts on one network, 10.199.0.0/24, which nothing outside of them can reach.

    With several ``links``, each host also has ``eth1``, on 10.199.1.0/24, and so on. Each interface may send ``mbit``
    Mbit/s; 0 sets no limit. The hosts' congestion control is the first of ``congestion_controls``
    that this machine allows, or otherwise the machine's own.
    """
    mark = f"ours-test-{os.getpid()}-{next(_networks)}"
    switch = f"{mark}-net"
    spaces = [f"{mark}-{i}" for i in range(count)]
    hosts = []
    try:
        _ip("netns", "add", switch)
        for link in range(links):
            _ip("-n", switch, "link", "add", f"bridge{link}", "type", "bridge")
            _ip("-n", switch, "link", "set", f"bridge{link}", "up")
        for i, space in enumerate(spaces):
            _ip("netns", "add", space)
            control = _choose_congestion_control(space, congestion_controls)
            host = Host(f"host{i}", space, f"10.199.0.{i + 1}", control, switch)
            hosts.append(host)
            _ip("-n", host.space, "link", "set", "lo", "up")
            for link in range(links):
                interface, port = f"eth{link}", f"port{i}-{link}"
                _ip("-n", space, "link", "add", interface, "type", "veth", "peer", "name", port, "netns", switch)
                _ip("-n", switch, "link", "set", port, "master", f"bridge{link}", "up")
                _ip("-n", space, "address", "add", f"10.199.{link}.{i + 1}/24", "dev", interface)
                _ip("-n", space, "link", "set", interface, "up")
                if mbit:
                    limit = ("tbf", "rate", f"{mbit}mbit", "burst", queue.burst, "latency", queue.latency)
                    _run("tc", "-n", space, "qdisc", "add", "dev", interface, "root", *limit)
        yield hosts
    finally:
        for space in [*spaces, switch]:
            with contextlib.suppress(subprocess.SubprocessError):
                _ip("netns", "del", space)


def why_no_loss() -> str:
    """Return why hosts cannot drop packets here; empty if they can."""
    try:
        with linked_hosts(1) as [host]:
            host.lose(1)
    except (OSError, subprocess.SubprocessError) as error:
        return f"packets cannot be dropped here: {getattr(error, 'stderr', error)}".strip()
    return ""
