"""What is done to a job, and what has to come of it."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from hosts import why_no_loss

from faults import connections, surroundings
from faults.job import PARTS, RESTART
from faults.surroundings import NONE
from faults.team import StoreProcess, Team

MAKE_GROUPS = (RESTART, "groups")  # the parts of the job that make groups,
JOINING_S = 4.0  # and the timeout that groups have there at most
DEATH_S = 1.0  # within which the survivors of a death have to raise, and the ranks that wait after their timeout

# What has to come of an injection, and the words of the table for it.
DIES = "the others name the rank within 1 s"
STOPS = "all name the rank within 1 s after the timeout"
CUT = "all name ranks of the other node within 1 s after the timeout"
RESET = "all name a rank within 1 s, or right results"  # nothing may have used that connection
WORKS = "right results"
STORE = "right results, or an error that names the store"
SHORT = "right results, or all name a rank"

NOTHING_DONE = "there was nothing to disturb"


@dataclass
class Strike:
    """A disturbance of a job that runs."""

    team: Team
    victim: int
    rng: random.Random
    store: StoreProcess | None = None
    # What ends the disturbance.
    undo: ExitStack = field(default_factory=ExitStack)
    note: str = ""  # what the table counts besides


@dataclass(frozen=True)
class Injection:
    """One kind of disturbance."""

    act: Callable[[Strike], object]
    effect: str
    parts: tuple[str, ...] = (*PARTS, RESTART)
    places: tuple[str, ...] = ("one node", "two nodes", "four nodes", "two hosts")
    timeout: float = 15  # of the groups, in seconds
    own: str = ""  # what the victim does to itself meanwhile; a name in job.OWN
    around: str = NONE  # the surroundings of all ranks
    own_store: bool = False  # whether the job has a store of its own
    why_not: Callable[[], str] = lambda: ""  # why it cannot be tried here
    share: float = 1.0  # how often it is tried, compared with others


def _nothing(_: Strike) -> None:
    """The rank does it itself."""


def _kill(strike: Strike) -> None:
    os.kill(strike.team.pid(strike.victim), signal.SIGKILL)


def _stop(strike: Strike) -> None:
    pid = strike.team.pid(strike.victim)
    os.kill(pid, signal.SIGSTOP)
    strike.undo.callback(os.kill, pid, signal.SIGCONT)


def _pause(strike: Strike) -> None:
    _stop(strike)
    time.sleep(strike.rng.uniform(0.02, 0.5))
    strike.undo.close()


def _kill_and_reuse(strike: Strike) -> None:
    """Kill the rank, and give its number to another process as soon as it is free."""
    pid = strike.team.pid(strike.victim)
    os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + 0.5
    while time.monotonic() < deadline and not strike.note:
        Path("/proc/sys/kernel/ns_last_pid").write_text(str(pid - 1))
        other = subprocess.Popen(["sleep", "60"])
        if other.pid == pid:
            strike.note = "the number was used again"
            strike.undo.callback(other.wait)
            strike.undo.callback(other.kill)
        else:
            other.kill()
            other.wait()


def _why_no_reuse() -> str:
    last = Path("/proc/sys/kernel/ns_last_pid")
    return "" if os.access(last, os.W_OK) and os.geteuid() == 0 else "the next process id cannot be chosen here"


def _take_link_down(strike: Strike) -> None:
    host = strike.team.host_of(strike.victim)
    strike.undo.callback(host.set_link, "up")
    host.set_link("down")


def _interrupt_link(strike: Strike) -> None:
    _take_link_down(strike)
    time.sleep(strike.rng.uniform(0.02, 0.5))
    strike.undo.close()


def _lose_packets(strike: Strike) -> None:
    host = strike.team.host_of(strike.victim)
    strike.undo.callback(host.end_loss)
    host.lose(2)


def _reset(strike: Strike) -> None:
    if not connections.reset_one(strike.team.pid(strike.victim), strike.team.store[1], strike.rng):
        strike.note = NOTHING_DONE


def _kill_store(strike: Strike) -> None:
    assert strike.store is not None
    strike.store.send_signal(signal.SIGKILL)


def _stop_store(strike: Strike) -> None:
    assert strike.store is not None
    strike.store.send_signal(signal.SIGSTOP)


_LOCAL = ("one node", "two nodes", "four nodes")
_BETWEEN = ("two nodes", "four nodes", "two hosts")
_HOSTS = ("two hosts",)
_CALLS = tuple(PARTS)
_NO_PROC = {"around": "no /proc", "why_not": surroundings.why_no_mounts, "share": 0.3}

INJECTIONS = {
    "SIGKILL": Injection(_kill, DIES, share=5),
    "SIGKILL with much memory mapped": Injection(_kill, DIES, _CALLS, own="hog"),
    "SIGKILL, and the process id is used again": Injection(_kill_and_reuse, DIES, _CALLS, why_not=_why_no_reuse),
    "the same without pidfd_open": Injection(
        _kill_and_reuse, DIES, _CALLS, why_not=_why_no_reuse, around="no pidfd_open", share=0.3
    ),
    "SIGKILL without /proc": Injection(_kill, DIES, _CALLS, **_NO_PROC),
    "exit without destroy": Injection(_nothing, DIES, _CALLS, own="exit"),
    "an exception ends the program": Injection(_nothing, DIES, _CALLS, own="raise"),
    "SIGSTOP beyond the timeout": Injection(_stop, STOPS, timeout=1.5, share=2),
    "SIGSTOP, and SIGCONT in time": Injection(_pause, WORKS, share=2),
    "a slow rank": Injection(_nothing, WORKS, own="sleep"),
    "the link goes down": Injection(_take_link_down, CUT, _CALLS, _HOSTS, timeout=1.5),
    "the link goes down for a moment": Injection(_interrupt_link, WORKS, places=_HOSTS),
    "2 % of the packets are lost": Injection(_lose_packets, WORKS, places=_HOSTS, why_not=why_no_loss),
    "a connection is reset": Injection(_reset, RESET, _CALLS, _BETWEEN, why_not=connections.why_no_reset, share=2),
    "the store is killed": Injection(_kill_store, STORE, places=_LOCAL, own_store=True, timeout=2),
    "the store is stopped": Injection(_stop_store, STORE, places=_LOCAL, own_store=True, timeout=2),
    "/dev/shm is full": Injection(
        _nothing, WORKS, around="full /dev/shm", why_not=surroundings.why_no_mounts, share=0.3
    ),
    "no /proc": Injection(_nothing, WORKS, **_NO_PROC),
    "no memory may be locked": Injection(_nothing, WORKS, around="no locked memory", share=0.3),
    "few descriptors": Injection(_nothing, SHORT, around="few descriptors", share=0.3),
}
