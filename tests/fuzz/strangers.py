"""Let strangers knock at the ports of a job that joins and trains, and print a table of what became of both.

Two ranks that share no memory add up numbers over TCP, check each sum, and make a new group now and then. Meanwhile
strangers connect to every port at which the ranks listen, and do what scanners, floods and forgers do. None of them
knows the secret of a group, so none may hear more than the challenge with which every handshake begins:

    make strangers ARGS="--tries 2000"
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import os
import random
import select
import socket
import struct
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 300
# As in csrc/transport/tcp/tcp_wire.h.
MAGIC, VERSION = 0x7063746F, 3
CHALLENGE_BYTES = 24
QUESTION = 0x6572656F
# What a stranger does with a connection. It returns what to answer to the challenge.
Act = Callable[[socket.socket], bytes]
PATIENCE_S = 2  # for a connection, which the system makes
KEPT = 300  # connections that strangers hold open at a time

JOB = """
    import json, os, resource, statistics, sys, time
    import torch, torch.distributed as dist
    import ourddp

    torch.set_num_threads(1)
    dist.init_process_group("ours")
    rank, folder = dist.get_rank(), sys.argv[1]
    steps = groups = wrong = 0
    times = {0.0: [], 1.0: []}  # of steps with strangers, and without
    calm, stop = torch.zeros(1), torch.zeros(1)
    first = None
    while not stop.item():
        began = time.perf_counter()
        numbers = torch.full((5000,), float(rank + steps))
        dist.all_reduce(numbers)
        wrong += not bool((numbers == 2.0 * steps + 1).all())
        times[calm.item()].append(time.perf_counter() - began)
        if steps % 10 == 0:
            group = dist.new_group(backend="ours")
            numbers = torch.ones(10)
            dist.all_reduce(numbers, group=group)
            wrong += not bool((numbers == 2).all())
            dist.destroy_process_group(group)
            groups += 1
        steps += 1
        if steps == 20:
            first = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            open(f"{folder}/joined-{rank}", "w").close()
        calm[0] = float(os.path.exists(f"{folder}/calm"))
        stop[0] = float(len(times[1.0]) >= 200)
        for flag in (calm, stop):
            dist.all_reduce(flag, dist.ReduceOp.MIN)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - first
    medians = [statistics.median(times[key]) for key in (0.0, 1.0)]
    print(json.dumps({"steps": steps, "groups": groups, "wrong": wrong, "medians": medians, "grown_kib": grown}))
    dist.destroy_process_group()
"""


@dataclass
class Tally:
    """What strangers of one kind tried, and what they got."""

    tries: int = 0
    challenged: int = 0
    accepted: int = 0


@dataclass
class Visit:
    """A connection of a stranger, and what it heard."""

    kind: str
    connection: socket.socket
    answer: bytes  # to the challenge, once it comes
    heard: int = 0


@dataclass
class Strangers:
    """All strangers, and the connections that they keep open."""

    ports: range
    tallies: dict[str, Tally] = field(default_factory=lambda: collections.defaultdict(Tally))
    visits: collections.deque[Visit] = field(default_factory=collections.deque)

    def knock(self, kind: str, act: Act) -> None:
        """Connect to each rank and act. The connection is kept, and looked at later."""
        for port in listening("tcp", self.ports):
            with contextlib.suppress(OSError):  # the group may have ended meanwhile
                connection = socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S)
                connection.setblocking(False)
                self.tallies[kind].tries += 1
                visit = Visit(kind, connection, b"")
                self.visits.append(visit)
                visit.answer = act(connection)

    def look(self) -> None:
        """Answer the challenges that have come, as far as their strangers do that, and give up the oldest visits."""
        for visit in self.visits:
            if visit.answer and visit.connection.fileno() >= 0:
                with contextlib.suppress(OSError):  # none has come yet, or the stranger was cut off
                    visit.heard = len(visit.connection.recv(CHALLENGE_BYTES))
                    visit.connection.sendall(visit.answer)
                    visit.answer = b""
        while len(self.visits) > KEPT:
            self.judge(self.visits.popleft())

    def judge(self, visit: Visit) -> None:
        """Count all that a stranger has heard. What is more than a challenge is a welcome."""
        with visit.connection, contextlib.suppress(OSError):
            while more := len(visit.connection.recv(4096)):
                visit.heard += more
        self.tallies[visit.kind].challenged += visit.heard > 0
        self.tallies[visit.kind].accepted += visit.heard > CHALLENGE_BYTES

    def ask(self) -> None:
        """Send questions that only the ranks of a job may ask, and rubbish, and see whether anybody answers."""
        tally = self.tallies["roll call (UDP)"]
        for port in listening("udp", self.ports):
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
                forged = struct.pack("<II16sQQ", QUESTION, 1, os.urandom(16), 0, random.getrandbits(64))
                for packet in (forged, os.urandom(40), os.urandom(random.randrange(2000))):
                    stranger.sendto(packet, ("127.0.0.1", port))
                    tally.tries += 1
                tally.accepted += bool(select.select([stranger], [], [], 0.02)[0])

    def end(self) -> None:
        """Close all connections."""
        while self.visits:
            self.judge(self.visits.popleft())


def listening(protocol: str, ports: range) -> Iterator[int]:
    """Yield the ports of the range at which somebody of this machine waits."""
    state = {"tcp": "0A", "udp": "07"}[protocol]
    lines = Path(f"/proc/net/{protocol}").read_text().split("\n")[1:]
    found = {int(words[1].split(":")[1], 16) for line in lines if (words := line.split()) and words[3] == state}
    yield from sorted(found & set(ports))


def forge(bytes_sent: int, after: bytes = b"") -> Act:
    """Return what a forger does: it answers the challenge with a hello of which only the proof is wrong."""

    def act(connection: socket.socket) -> bytes:
        sender, receiver = random.choice([(0, 1), (1, 0)])
        proof = random.getrandbits(64)
        hello = struct.pack("<6I16sQ", MAGIC, VERSION, sender, receiver, random.randrange(2), 0, os.urandom(16), proof)
        return (hello + after)[:bytes_sent]

    return act


def say(text: bytes) -> Act:
    """Return what a stranger does that speaks another protocol, and does not listen."""

    def act(connection: socket.socket) -> bytes:
        connection.send(text)
        return b""

    return act


def leave(connection: socket.socket) -> bytes:
    """Close the connection at once."""
    connection.close()
    return b""


def vanish(connection: socket.socket) -> bytes:
    """Reset the connection at once."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    return leave(connection)


def acts() -> dict[str, Act]:
    """Return what strangers do, by what the table calls it."""
    return {
        "connect and close": leave,
        "connect and reset": vanish,
        "connect and say nothing": say(b""),
        "HTTP": say(b"GET / HTTP/1.1\r\nHost: node1:20000\r\nUser-Agent: scanner\r\n\r\n"),
        "TLS": say(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + os.urandom(506)),
        "SSH": say(b"SSH-2.0-OpenSSH_9.2p1 Debian-2+deb12u3\r\n"),
        "random bytes": say(os.urandom(random.randrange(1, 5000))),
        "a megabyte": say(bytes(1 << 20)),
        "hello, cut short": forge(random.randrange(1, 48)),
        "hello, wrong proof": forge(48),
        "hello and frames": forge(1 << 20, struct.pack("<IBBHIIQQQ", MAGIC, 1, 0, 0, 0, 0, 1, 1 << 40, 1 << 40) * 20),
    }


def free_ports(count: int) -> range:
    """Return ports at which nobody waits now, below those that the system gives."""
    while True:
        first = random.randrange(20000, 32000 - count)
        ports = range(first, first + count)
        if not any(True for _ in listening("tcp", ports)):
            return ports


@contextlib.contextmanager
def job(ports: range, folder: str) -> Iterator[list[subprocess.Popen[str]]]:
    """Run the two ranks, of which nothing is left at the end."""
    common = os.environ | {
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(ports[-1]),
        "OURS_PORT_RANGE": f"{ports[0]}-{ports[-2]}",
        "OURS_INTERFACE": "127.0.0.1",
        "PYTHONPATH": str(ROOT),
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(JOB), folder],
            env=common | {"RANK": str(rank), "LOCAL_RANK": str(rank), "OURS_NODE_ID": f"node {rank}"},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        yield ranks
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


def harass(strangers: Strangers, ranks: list[subprocess.Popen[str]], tries: int, folder: Path) -> None:
    """Let strangers come from the moment when the ranks listen until there were enough since they all had joined."""
    deadline = time.monotonic() + TIMEOUT_S
    joined = 0
    while joined < tries and all(rank.poll() is None for rank in ranks) and time.monotonic() < deadline:
        before = sum(tally.tries for tally in strangers.tallies.values())
        for kind, act in acts().items():
            strangers.knock(kind, act)
        strangers.ask()
        strangers.look()
        if all((folder / f"joined-{rank}").exists() for rank in range(2)):
            joined += sum(tally.tries for tally in strangers.tallies.values()) - before
    strangers.end()
    (folder / "calm").touch()


def main() -> int:
    """Return 1 if a stranger was let in, or the job was disturbed."""
    command = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    command.add_argument("--tries", type=int, default=2000, help="how often strangers try (default: %(default)s)")
    arguments = command.parse_args()
    ports = free_ports(60)
    strangers = Strangers(ports[:-1])
    with tempfile.TemporaryDirectory() as folder, job(ports, folder) as ranks:
        harass(strangers, ranks, arguments.tries, Path(folder))
        outputs = [rank.communicate(timeout=TIMEOUT_S)[0] for rank in ranks]
        codes = [rank.returncode for rank in ranks]
    print(f"{'strangers':26} {'tries':>7} {'challenged':>11} {'accepted':>9}")
    for kind, tally in strangers.tallies.items():
        print(f"{kind:26} {tally.tries:7} {tally.challenged:11} {tally.accepted:9}")
    accepted = sum(tally.accepted for tally in strangers.tallies.values())
    print(f"{'all':26} {sum(tally.tries for tally in strangers.tallies.values()):7} {'':11} {accepted:9}")
    wrong = 0
    for rank, (code, output) in enumerate(zip(codes, outputs, strict=True)):
        if code != 0:
            print(f"rank {rank} ended with {code}")
            continue
        done = json.loads(output)
        wrong += done["wrong"]
        with_them, without = (f"{1e3 * seconds:.2f} ms" for seconds in done["medians"])
        grown = f"{done['grown_kib'] >> 10} MiB"
        print(
            f"rank {rank}: {done['steps']} steps and {done['groups']} new groups, {done['wrong']} wrong results; "
            f"a step took {with_them} with strangers and {without} without; memory grew by {grown}"
        )
    return 1 if accepted or wrong or any(codes) else 0


if __name__ == "__main__":
    sys.exit(main())
