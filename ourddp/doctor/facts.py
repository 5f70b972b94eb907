"""What one rank can find out by itself about its process, its machine and its network."""

from __future__ import annotations

import contextlib
import fcntl
import os
import platform
import resource
import socket
import struct
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch

import ourddp
from ourddp import _C
from ourddp.joining import Launch

SIOCGIFMTU = 0x8921  # the same on all architectures
CONGESTION = Path("/proc/sys/net/ipv4")
NAMESPACES = ("pid", "user", "net")


@dataclass(frozen=True)
class Facts:
    """One rank's facts. Sizes are in bytes; None: unlimited, or not known. An error is empty if there is none."""

    rank: int = 0
    host: str = ""
    pid: int = 0
    user: int = 0
    boot: str = ""  #: the same for all processes of one running system
    node: str = ""  #: OURS_NODE_ID
    namespaces: dict[str, str] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    options: dict[str, str] = field(default_factory=dict)
    options_error: str = ""
    probe: str = ""  #: where others find a little memory of this process; see _C.NodeProbe
    probe_error: str = ""
    memory: int | None = None  #: what the machine and the control group still have
    lockable: int | None = None
    rdma: list[str] = field(default_factory=list)  #: network devices that need locked pages
    descriptors: int = 0  #: open now
    most_descriptors: int | None = None  #: the hard limit, to which the backend raises its own
    interfaces: list[list[Any]] = field(default_factory=list)  #: name, address, whether it is loopback, MTU
    addresses: list[str] = field(default_factory=list)  #: at which other nodes would reach this rank
    addresses_error: str = ""
    ports: list[list[Any]] = field(default_factory=list)  #: address and port of what listens during the examination
    ports_error: str = ""
    congestion: str = ""  #: the system's
    congestion_allowed: str = ""
    congestion_near: str = ""  #: what connections to near nodes get, if that is another
    congestion_error: str = ""  #: why that of OURS_TCP_CONGESTION cannot be had
    cores: list[int] = field(default_factory=list)
    threads: int = 1
    machine_cores: int = 0  #: also those that this rank may not use
    load: float = 0.0  #: of the machine, in the last minute

    def machine(self) -> tuple[str, str]:
        """Return what ranks have in common that may be able to share memory."""
        return self.boot, self.node

    def network(self) -> tuple[str, str, str, str]:
        """Return what ranks have in common that have the same addresses."""
        return self.boot, self.node, self.host, self.namespaces.get("net", "")

    def name(self) -> str:
        """Return how messages name this rank."""
        return f"rank {self.rank} (host {self.host}, pid {self.pid})"

    def mtu(self, address: str) -> int | None:
        """Return the largest packet that the interface with this address sends; None for loopback, too."""
        return next((mtu for _, own, loopback, mtu in self.interfaces if own == address and not loopback), None)

    def to_json(self) -> dict[str, Any]:
        """Return it as plain values."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Facts:
        """Return the facts of a rank, whose version of this package may know more or fewer of them."""
        known = {each.name for each in fields(cls)}
        return cls(**{name: value for name, value in values.items() if name in known})


def gather(place: Launch) -> dict[str, Any]:
    """Return the arguments of Facts that need no other rank, and are not about ports or shared memory."""
    found: dict[str, Any] = {
        "rank": place.rank,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "user": os.getuid(),
        "boot": _line(Path("/proc/sys/kernel/random/boot_id")),
        "namespaces": {name: _link(Path(f"/proc/thread-self/ns/{name}")) for name in NAMESPACES},
        "versions": {
            "ourddp": ourddp.__version__,
            "torch": torch.__version__,
            "Python": platform.python_version(),
        },
        "memory": _C.memory_left(),
        "lockable": _limit(resource.RLIMIT_MEMLOCK, 0),
        "rdma": sorted(path.name for path in Path("/sys/class/infiniband").glob("*")),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "most_descriptors": _limit(resource.RLIMIT_NOFILE, 1),
        "interfaces": [[*one, _mtu(one[0])] for one in _C.interfaces()],
        "cores": sorted(os.sched_getaffinity(0)),
        "threads": torch.get_num_threads(),
        "machine_cores": os.cpu_count() or 1,
        "load": os.getloadavg()[0],
    }
    try:
        found["options"] = options = _C.option_values()
    except ValueError as error:
        return {**found, "options_error": str(error)}
    found["node"] = options["OURS_NODE_ID"]
    try:
        found["addresses"] = _C.own_addresses(place.master_addr)
    except (ValueError, RuntimeError) as error:
        found["addresses_error"] = str(error).splitlines()[0]
    return {**found, **congestion(options["OURS_TCP_CONGESTION"])}


def congestion(asked: str) -> dict[str, str]:
    """Return the facts about congestion control; ``asked`` is the value of OURS_TCP_CONGESTION."""
    usual, allowed = (_line(CONGESTION / f"tcp_{name}congestion_control") for name in ("", "allowed_"))
    near = _C.near_congestion_control(asked, usual, allowed)
    error = ""
    if asked:
        with socket.socket() as probe:
            try:
                probe.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, asked.encode())
            except OSError as refused:
                error = refused.strerror or str(refused)
    return {
        "congestion": usual,
        "congestion_allowed": allowed,
        "congestion_near": near,
        "congestion_error": error,
    }


def _limit(which: int, hard: int) -> int | None:
    value = resource.getrlimit(which)[hard]
    return None if value == resource.RLIM_INFINITY else value


def _mtu(interface: str) -> int | None:
    # /sys may show the interfaces of another network namespace.
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket, contextlib.suppress(OSError):
        request = struct.pack("16s16x", interface.encode()[:15])
        return int(struct.unpack("16si12x", fcntl.ioctl(any_socket, SIOCGIFMTU, request))[1])
    return None


def _line(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _link(path: Path) -> str:
    try:
        return str(path.readlink())
    except OSError:
        return ""
