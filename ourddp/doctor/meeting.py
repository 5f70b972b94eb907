"""How the ranks of an examination meet, try each other's memory and ports, and tell rank 0: through a c10d store alone.

Each rank publishes its facts. Rank 0 waits for them until time is up and publishes the roster, the ranks that came.
These try their peers and publish what they found, while rank 0 answers their questions for the time.
"""

from __future__ import annotations

import datetime
import json
import os
import secrets
import socket
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from ourddp import _C
from ourddp.doctor import ports
from ourddp.doctor.facts import Facts, gather
from ourddp.joining import Launch

TRIALS = 30.0  # seconds for trying peers
FAREWELL = 3.0  # seconds in which the others have to see that all is over, where rank 0 serves the store
ROUNDS = 5  # questions for the time; the quickest answer counts
AT_A_TIME = 32  # connections that a rank tries at the same time


class NoMeetingError(RuntimeError):
    """A rank does not reach the store, or rank 0; the message says what to do."""


@dataclass(frozen=True)
class Trials:
    """What a rank found out about its peers. Reasons are empty where all is well."""

    memory: dict[int, str] = field(default_factory=dict)  #: by rank of the same machine: why it cannot be shared
    network: dict[int, str] = field(default_factory=dict)  #: by first rank of another host: why it is not reached
    clock: tuple[float, float] | None = None  #: seconds ahead of rank 0's clock, and how wrong that may be


@dataclass(frozen=True)
class Job:
    """All that the checks judge."""

    size: int
    facts: dict[int, Facts]  #: by rank, of those that came
    trials: dict[int, Trials] = field(default_factory=dict)  #: by rank, of those that ended their trials

    def hosts(self) -> list[list[Facts]]:
        """Return the ranks of each host, in the order of their first ranks."""
        return self._grouped(Facts.network)

    def machines(self) -> list[list[Facts]]:
        """Return the ranks of each machine that may share memory."""
        return self._grouped(Facts.machine)

    def _grouped(self, key: Any) -> list[list[Facts]]:
        found: dict[object, list[Facts]] = {}
        for rank in sorted(self.facts):
            found.setdefault(key(self.facts[rank]), []).append(self.facts[rank])
        return list(found.values())


# --- the store -------------------------------------------------------------------------------------------------------


def open_store(place: Launch, patience: float) -> dist.Store:
    """Return the job's store; NoMeetingError if it cannot be reached within ``patience`` seconds."""
    serves = place.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"  # that is torchrun's
    where = f"rank {place.rank} has no store at {place.master_addr}, port {place.master_port}"
    if not serves:
        _await_port(place, where, time.monotonic() + patience)
    try:
        store = dist.TCPStore(
            place.master_addr,
            place.master_port,
            is_master=serves,
            wait_for_workers=False,
            timeout=datetime.timedelta(seconds=patience),
        )
    except (RuntimeError, ValueError) as error:
        raise NoMeetingError(f"{where}: {_first_line(error)}. Is MASTER_PORT free on the host of rank 0?") from error
    return dist.PrefixStore(f"doctor/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def _await_port(place: Launch, where: str, deadline: float) -> None:
    """Wait until something listens there: a store that cannot connect writes pages to stderr."""
    while True:
        try:
            socket.create_connection((place.master_addr, place.master_port), timeout=ports.PATIENCE).close()
            return
        except OSError as error:
            if time.monotonic() > deadline:
                raise NoMeetingError(
                    f"{where}: {error.strerror or error}. Was rank 0 started, is MASTER_ADDR right, and does a "
                    "firewall let this port through?"
                ) from error
        time.sleep(0.1)


def _await(store: dist.Store, keys: Mapping[int, str], deadline: float, pause: float = 0.02) -> list[int]:
    """Wait for all keys until time is up. Return the ranks whose key is there. A store's own wait() would log it."""
    names = list(keys.values())
    while names and not store.check(names):
        if time.monotonic() > deadline:
            return [rank for rank, name in keys.items() if store.check([name])]
        time.sleep(pause)
    return list(keys)


def _load(store: dist.Store, key: str) -> Any:
    return json.loads(store.get(key))


# --- the ranks -------------------------------------------------------------------------------------------------------


def meet(store: dist.Store, place: Launch, patience: float) -> Job | None:
    """Examine the job together with the other ranks, and return it on rank 0; on the others None.

    Ranks that have not come within ``patience`` seconds are left out. Raises NoMeetingError if the store or rank 0
    goes away.
    """
    deadline = time.monotonic() + patience
    found = gather(place)
    word = secrets.token_hex(16)
    allowed = found.get("options", {}).get("OURS_PORT_RANGE", "")
    with ports.Listener(found.get("addresses", []), word, allowed) as listener:
        found |= {"ports": listener.bound, "ports_error": listener.error}
        probe, found["probe"], found["probe_error"] = _probe()
        try:
            store.set(f"facts/{place.rank}", json.dumps([Facts(**found).to_json(), word]))
            if place.rank == 0:
                return _lead(store, place, deadline)
            _follow(store, place, deadline)
        except (RuntimeError, ValueError) as error:
            if isinstance(error, NoMeetingError):
                raise
            raise NoMeetingError(f"rank {place.rank} has lost the job's store: {_first_line(error)}") from error
        finally:
            del probe  # peers look at it until now
    return None


def _probe() -> tuple[_C.NodeProbe | None, str, str]:
    try:
        probe = _C.NodeProbe()
    except RuntimeError as error:
        return None, "", _first_line(error)
    return probe, probe.address(), ""


def _lead(store: dist.Store, place: Launch, deadline: float) -> Job:
    came = _await(store, {rank: f"facts/{rank}" for rank in range(place.world_size)}, deadline)
    store.set("roster", json.dumps(came))
    job, words = _roster(store, place)
    trials = {0: _try_peers(job, words, 0)}
    deadline = time.monotonic() + TRIALS
    _tell_the_time(store, [host[0].rank for host in job.hosts()[1:]], deadline)
    ended = _await(store, {rank: f"trials/{rank}" for rank in came if rank != 0}, deadline)
    for rank in ended:
        memory, network, clock = _load(store, f"trials/{rank}")
        by_rank = ({int(peer): why for peer, why in each.items()} for each in (memory, network))  # JSON has texts
        trials[rank] = Trials(*by_rank, tuple(clock) if clock else None)
    store.set("over", "")
    _await(store, {rank: f"left/{rank}" for rank in ended}, time.monotonic() + FAREWELL)
    return Job(place.world_size, job.facts, trials)


def _follow(store: dist.Store, place: Launch, deadline: float) -> None:
    if not _await(store, {0: "roster"}, deadline + TRIALS):
        raise NoMeetingError(f"rank {place.rank} has waited in vain for rank 0: was it started, and did it fail?")
    job, words = _roster(store, place)
    if place.rank not in job.facts:
        raise NoMeetingError(f"rank {place.rank} came too late: give all ranks more time with --timeout")
    trials = _try_peers(job, words, place.rank)
    first = any(host[0].rank == place.rank for host in job.hosts()[1:])
    clock = _ask_the_time(store, place.rank, time.monotonic() + TRIALS) if first else None
    store.set(f"trials/{place.rank}", json.dumps([trials.memory, trials.network, clock]))
    _await(store, {0: "over"}, time.monotonic() + 2 * TRIALS)
    store.set(f"left/{place.rank}", "")


def _roster(store: dist.Store, place: Launch) -> tuple[Job, dict[int, str]]:
    """Return the job of the ranks that came, and the words of their listeners."""
    facts, words = {}, {}
    for rank in _load(store, "roster"):
        values, words[rank] = _load(store, f"facts/{rank}")
        facts[rank] = Facts.from_json(values)
    return Job(place.world_size, facts), words


# --- trying peers ----------------------------------------------------------------------------------------------------


def _try_peers(job: Job, words: Mapping[int, str], rank: int) -> Trials:
    own = job.facts[rank]
    beside = [peer for peer in job.facts.values() if peer.machine() == own.machine() and peer.rank != rank]
    memory = {peer.rank: _C.NodeProbe.obstacle(peer.probe) for peer in beside if peer.probe}
    firsts = [host[0] for host in job.hosts()]
    if own not in firsts:
        return Trials(memory)
    others = [peer for peer in firsts if peer is not own]
    with ThreadPoolExecutor(AT_A_TIME) as pool:
        reasons = list(pool.map(lambda peer: ports.obstacle(peer.ports, words[peer.rank]), others))
    return Trials(memory, {peer.rank: why for peer, why in zip(others, reasons, strict=True)})


def _tell_the_time(store: dist.Store, ranks: list[int], deadline: float) -> None:
    """Answer the questions of each rank when it begins to ask, so that one that never does holds up no other."""
    waiting = list(ranks)
    while waiting and time.monotonic() < deadline:
        asking = [rank for rank in waiting if store.check([f"clock/{rank}/0/asked"])]
        for rank in asking:
            _answer(store, rank, min(deadline, time.monotonic() + FAREWELL))
            waiting.remove(rank)
        if not asking:
            time.sleep(0.001)


def _answer(store: dist.Store, rank: int, deadline: float) -> None:
    for number in range(ROUNDS):
        if not _await(store, {rank: f"clock/{rank}/{number}/asked"}, deadline, pause=0.001):
            return
        store.set(f"clock/{rank}/{number}/told", str(time.time_ns()))


def _ask_the_time(store: dist.Store, rank: int, deadline: float) -> tuple[float, float] | None:
    """Return how far this rank's clock is ahead of rank 0's, and how wrong that may be, in seconds.

    Rank 0 looked at its clock at some time between question and answer (Cristian 1989, "Probabilistic clock
    synchronization").
    """
    best: tuple[float, float] | None = None
    for number in range(ROUNDS):
        asked = time.time_ns()
        store.set(f"clock/{rank}/{number}/asked", "")
        if not _await(store, {rank: f"clock/{rank}/{number}/told"}, deadline, pause=0.001):
            return best
        told, heard = int(store.get(f"clock/{rank}/{number}/told")), time.time_ns()
        half = (heard - asked) / 2e9
        if best is None or half < best[1]:
            best = (asked - told) / 1e9 + half, half
    return best


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [repr(error)])[0].rstrip(".")
