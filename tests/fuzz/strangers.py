"""Let strangers knock at the ports of a job that joins and trains, and print a table of what became of both.

Four ranks on two played nodes train a small model, exchange messages, compare each result with what it must be, and
make a new group now and then. Meanwhile strangers connect to every port at which the ranks wait, and do what scanners,
floods and forgers do. None of them knows the secret of a group, so none may hear more than the challenge with which
every handshake begins:

    make strangers ARGS="--tries 2000"
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import re
import select
import socket
import struct
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist
from programs import job, started
from ranks import node_ids
from stranger_kinds import CHALLENGE_BYTES, KINDS, QUESTIONS, Door, Kind, Question

RANKS = 4
TIMEOUT_S = 300
PATIENCE_S = 2  # for a connection, which the system makes, and for the last word of a rank
KEPT = 900  # connections that strangers hold open at a time: more than the ranks let in
CARD = re.compile(r"(.*/ours/\d+/(?:calls|messages)/)card/(\d+)")
MOST_GROWN = 32 << 20  # bytes of a rank's memory
MOST_FILES = 64 + 80  # descriptors: 64 strangers, and its own
CALM_STEPS = 50

JOB = """
    import json, os, statistics, sys, time
    import torch, torch.distributed as dist
    import ourddp

    torch.set_num_threads(1)
    dist.init_process_group("ours")  # an earlier attempt
    dist.destroy_process_group()
    dist.init_process_group("ours")
    rank, folder = dist.get_rank(), sys.argv[1]
    mean, other = (dist.get_world_size() - 1) / 2, (rank + 2) % 4
    steps = groups = wrong = 0
    model = ourddp.DistributedDataParallel(torch.nn.Linear(50, 20))
    times = {0.0: [], 1.0: []}  # of steps with strangers, and without
    calm, stop = torch.zeros(1), torch.zeros(1)
    memory, files = [], 0

    def note_memory():
        memory.append(int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE"))

    while not stop.item():
        began = time.perf_counter()
        model.zero_grad()
        model(torch.full((1, 50), float(rank + steps))).sum().backward()
        wrong += not bool((model.module.weight.grad == mean + steps).all())
        numbers = torch.full((5000,), float(rank + steps))
        dist.all_reduce(numbers)
        wrong += not bool((numbers == 4 * (mean + steps)).all())
        message = dist.isend(torch.full((300,), float(rank + steps)), other)
        dist.recv(numbers[:300], other)
        message.wait()
        wrong += not bool((numbers[:300] == other + steps).all())
        times[calm.item()].append(time.perf_counter() - began)
        if steps % 10 == 0:
            group = dist.new_group(backend="ours")
            numbers = torch.ones(10)
            dist.all_reduce(numbers, group=group)
            wrong += not bool((numbers == 4).all())
            dist.destroy_process_group(group)
            groups += 1
        steps += 1
        if steps == 20:
            note_memory()
            open(f"{folder}/joined-{rank}", "w").close()
        files = max(files, len(os.listdir("/proc/self/fd")))
        calm[0] = float(os.path.exists(f"{folder}/calm"))
        stop[0] = float(len(times[1.0]) >= int(sys.argv[2]))
        for flag in (calm, stop):
            dist.all_reduce(flag, dist.ReduceOp.MIN)
    note_memory()
    medians = [statistics.median(times[key]) for key in (0.0, 1.0)]
    told = {"steps": steps, "groups": groups, "wrong": wrong, "medians": medians, "memory": memory, "files": files}
    print(json.dumps(told))
    dist.destroy_process_group()
"""


@dataclass
class Tally:
    """What strangers of one kind tried, and what they got."""

    tries: int = 0
    answered: int = 0  #: the challenge came, and the stranger answered it
    heard: int = 0  #: bytes
    accepted: int = 0


@dataclass
class Visit:
    """A connection of a stranger, and what it heard."""

    kind: Kind
    door: Door
    connection: socket.socket
    words: bytes  # that it has yet to say
    heard: bytes = b""
    answered: bool = False


@dataclass
class Strangers:
    """All strangers, and the connections that they keep open."""

    store: dist.TCPStore
    kinds: Sequence[Kind]
    questions: Mapping[str, Question]
    tallies: dict[str, Tally] = field(default_factory=lambda: collections.defaultdict(Tally))
    visits: collections.deque[Visit] = field(default_factory=collections.deque)
    doors: dict[str, Door] = field(default_factory=dict)
    own_keys: dict[int, bytes] = field(default_factory=dict)  # of the ports at which processes say where they are

    def tries(self) -> int:
        """Return how often strangers have tried."""
        return sum(tally.tries for tally in self.tallies.values())

    def look_for_doors(self) -> list[Door]:
        """Return those that are open now. The store knows which rank waits where, and the secrets."""
        keys = set(self.store.list_keys())
        secrets = {key[: -len("terms")]: self.secret(key) for key in sorted(keys) if key.endswith("/terms")}
        for key in keys - set(self.doors):
            card = CARD.search(key)
            if card is None or card[1] not in secrets:
                continue
            words = self.store.get(key).decode().split()
            ports = [int(word.rpartition(":")[2]) for word in words[6:]]
            secret, earlier = secrets[card[1]], next(iter(secrets.values()))
            self.doors[key] = Door(ports[0], int(card[2]), RANKS, int(words[3]), secret, earlier)
            self.own_keys[ports[1]] = bytes.fromhex(words[2])
        waiting = listening("tcp")
        return [door for door in self.doors.values() if door.port in waiting and door.secret != door.earlier]

    def secret(self, key: str) -> bytes:
        """Return the secret of a group."""
        return bytes.fromhex(self.store.get(key).decode().split()[1])

    def knock(self, door: Door, kind: Kind) -> None:
        """Connect to a rank and say what strangers of that kind say at once."""
        with contextlib.suppress(OSError):  # the group may have ended meanwhile
            connection = socket.create_connection(("127.0.0.1", door.port), timeout=PATIENCE_S)
            connection.setblocking(False)
            self.tallies[kind.name].tries += 1
            if kind.ends == "reset":
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            if kind.ends:
                return connection.close()
            self.visits.append(visit := Visit(kind, door, connection, kind.greets()))
            self.go_on(visit)

    def go_on(self, visit: Visit) -> bool:
        """Hear and say what is possible now. Return whether the connection has ended."""
        over = False
        try:
            while more := visit.connection.recv(4096):
                visit.heard += more
            over = True
        except BlockingIOError:
            pass
        except OSError:
            over = True
        if visit.kind.answers and not visit.answered and len(visit.heard) == CHALLENGE_BYTES and not over:
            visit.answered = True
            self.tallies[visit.kind.name].answered += 1
            visit.words = visit.kind.answers(visit.door, visit.heard)
        with contextlib.suppress(OSError):
            if visit.words:
                visit.words = visit.words[visit.connection.send(visit.words[: 1 if visit.kind.slowly else None]) :]
        return over

    def look(self) -> None:
        """Go on with all visits, and give up those that have ended and the oldest ones."""
        for visit in list(self.visits):
            if self.go_on(visit):
                self.visits.remove(visit)
                self.judge(visit)
        while len(self.visits) > KEPT:
            self.judge(self.visits.popleft())

    def judge(self, visit: Visit) -> None:
        """Count what a stranger has heard. What is more than a challenge is a welcome."""
        self.go_on(visit)
        visit.connection.close()
        self.tallies[visit.kind.name].heard += len(visit.heard)
        self.tallies[visit.kind.name].accepted += len(visit.heard) > CHALLENGE_BYTES

    def ask(self) -> None:
        """Send questions that only the ranks of a job may ask, and rubbish, and see whether anybody answers."""
        for port in listening("udp") & set(self.own_keys):
            for name, words in self.questions.items():
                with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
                    stranger.sendto(words(self.own_keys[port]), ("127.0.0.1", port))
                    self.tallies[name].tries += 1
                    if select.select([stranger], [], [], 0.005)[0]:
                        self.tallies[name].heard += len(stranger.recv(4096))
                        self.tallies[name].accepted += 1

    def end(self) -> None:
        """Hear what ranks have yet to say, and close all connections."""
        deadline = time.monotonic() + PATIENCE_S
        while any(visit.kind.answers and not visit.kind.slowly for visit in self.visits):
            self.look()
            if time.monotonic() > deadline:
                break
            time.sleep(0.01)
        while self.visits:
            self.judge(self.visits.popleft())


def listening(protocol: str) -> set[int]:
    """Return the ports at which somebody of this machine waits."""
    state = {"tcp": "0A", "udp": "07"}[protocol]
    lines = Path(f"/proc/net/{protocol}").read_text().split("\n")[1:]
    return {int(words[1].split(":")[1], 16) for line in lines if (words := line.split()) and words[3] == state}


def harass(strangers: Strangers, ranks: list[subprocess.Popen[str]], tries: int, folder: Path) -> None:
    """Let strangers come from the moment when the ranks listen, and for half of the tries after all have joined."""
    deadline = time.monotonic() + TIMEOUT_S
    enough = None
    while all(rank.poll() is None for rank in ranks) and time.monotonic() < deadline:
        if enough is None and all((folder / f"joined-{rank}").exists() for rank in range(RANKS)):
            enough = max(tries, strangers.tries() + tries // 2)
        if enough is not None and strangers.tries() >= enough:
            break
        for door in strangers.look_for_doors():
            for kind in strangers.kinds:
                for _ in range(kind.times):
                    strangers.knock(door, kind)
            strangers.look()
        strangers.ask()
    strangers.end()
    (folder / "calm").touch()


@dataclass
class Outcome:
    """What became of the strangers, and of the ranks: their exit codes, and what they say of themselves."""

    tallies: Mapping[str, Tally]
    codes: list[int]
    told: list[dict[str, Any]]

    @property
    def accepted(self) -> int:
        """How many strangers were let in, or heard what is not for them."""
        return sum(tally.accepted for tally in self.tallies.values())

    def faults(self) -> list[str]:
        """Return what should not be."""
        found = [f"{self.accepted} strangers were accepted"] if self.accepted else []
        for rank, (code, told) in enumerate(zip(self.codes, self.told, strict=True)):
            if code != 0:
                found.append(f"rank {rank} ended with {code}")
                continue
            first, last = told["memory"]
            if told["wrong"]:
                found.append(f"rank {rank} got {told['wrong']} wrong results")
            if last - first > MOST_GROWN:
                found.append(f"rank {rank} grew by {(last - first) >> 20} MiB")
            if told["files"] > MOST_FILES:
                found.append(f"rank {rank} had {told['files']} descriptors")
        return found


def run(
    tries: int,
    kinds: Sequence[Kind] = KINDS,
    questions: Mapping[str, Question] = QUESTIONS,
    python: str = sys.executable,
) -> Outcome:
    """Run the job, and let strangers of these kinds try so often once it trains."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    strangers = Strangers(store, kinds, questions)
    around = {"OURS_INTERFACE": "127.0.0.1"}
    each = [rank | node | around for rank, node in zip(job(RANKS, store), node_ids(RANKS, 2), strict=True)]
    with tempfile.TemporaryDirectory() as folder:
        command = [python, "-c", textwrap.dedent(JOB), folder, str(CALM_STEPS)]
        with started([command] * RANKS, each, stderr=None) as ranks:
            harass(strangers, ranks, tries, Path(folder))
            outputs = [rank.communicate(timeout=TIMEOUT_S)[0] for rank in ranks]
    codes = [rank.returncode for rank in ranks]
    told = [json.loads(output) if code == 0 else {} for code, output in zip(codes, outputs, strict=True)]
    return Outcome(strangers.tallies, codes, told)


def table(outcome: Outcome) -> Iterator[str]:
    """Yield the lines of the report."""
    yield f"{'strangers':30} {'tries':>7} {'answered':>9} {'bytes heard':>12} {'accepted':>9}"
    total = Tally()
    for name, tally in outcome.tallies.items():
        yield f"{name:30} {tally.tries:7} {tally.answered:9} {tally.heard:12} {tally.accepted:9}"
        for column in vars(total):
            setattr(total, column, getattr(total, column) + getattr(tally, column))
    yield f"{'all':30} {total.tries:7} {total.answered:9} {total.heard:12} {total.accepted:9}"
    for rank, told in enumerate(outcome.told):
        if not told:
            continue
        with_them, without = (f"{1e3 * seconds:.2f} ms" for seconds in told["medians"])
        grown = (told["memory"][1] - told["memory"][0]) / (1 << 20)
        yield (
            f"rank {rank}: {told['steps']} steps and {told['groups']} new groups, {told['wrong']} wrong results; "
            f"a step took {with_them} with strangers and {without} without; memory grew by {grown:.1f} MiB, and there "
            f"were at most {told['files']} descriptors"
        )


def main() -> int:
    """Return 1 if a stranger was let in, or the job was disturbed."""
    command = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    command.add_argument("--tries", type=int, default=3000, help="how often strangers try (default: %(default)s)")
    outcome = run(command.parse_args().tries)
    print("\n".join([*table(outcome), *outcome.faults()]))
    return 1 if outcome.faults() else 0


if __name__ == "__main__":
    sys.exit(main())
