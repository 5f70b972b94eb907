"""How well ourddp.stats() names a slow link between two of three hosts, and predicts what its slowness costs.

    python benchmarks/slow_link.py --trials 200

It makes three hosts on this machine, with a rank each (tests/support/hosts.py). Packets between the first two go
through this program, which holds them up by half of 5 to 200 ms in some steps. The prediction is the saving that both
ends of the link tell of these steps; the measurement is how much longer they took. It needs a user who may make
namespaces.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import fcntl
import mmap
import os
import random
import select
import statistics
import struct
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist

import ourddp

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "support"))
import hosts as networks
import ranks

COMPUTE = 0.02  # seconds of a step
STEPS = 10
SHORTEST, LONGEST = 0.005, 0.2  # seconds by which a step is to take longer
TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x1, 0x1000
PACKET = 65536


def open_end(host: networks.Host, peer: networks.Host) -> int:
    """Lead what ``host`` sends to ``peer`` to this program. Return the descriptor to read from and write to."""
    made: list[int] = []

    def enter_and_open() -> None:
        host.enter()
        end = os.open("/dev/net/tun", os.O_RDWR | os.O_CLOEXEC)
        fcntl.ioctl(end, TUNSETIFF, struct.pack("16sH22x", b"slow0", IFF_TUN | IFF_NO_PI))
        made.append(end)

    thread = threading.Thread(target=enter_and_open)
    thread.start()
    thread.join()
    for command in ("link set slow0 up", f"route add {peer.address}/32 dev slow0 src {host.address}"):
        subprocess.run(["ip", "-n", host.space, *command.split()], check=True)
    return made[0]


def forward(ends: tuple[int, int], delay: mmap.mmap, over: threading.Event) -> None:
    """Pass packets on from each end to the other, ``delay`` seconds later."""
    held: dict[int, collections.deque[tuple[float, bytes]]] = {end: collections.deque() for end in ends}
    while not over.is_set():
        now = time.monotonic()
        for end, packets in held.items():
            while packets and packets[0][0] <= now:
                os.write(end, packets.popleft()[1])
        due = min((packets[0][0] for packets in held.values() if packets), default=now + 0.1)
        for end in select.select(ends, [], [], max(due - now, 0))[0]:
            packet = os.read(end, PACKET)
            other = ends[1] if end == ends[0] else ends[0]
            held[other].append((time.monotonic() + struct.unpack("d", delay[:8])[0], packet))


def steps(data: torch.Tensor) -> tuple[float, ourddp.Stats]:
    """Make some steps. Return how long they took, and what their collectives have cost."""
    dist.barrier()
    before = ourddp.stats(recent=False)
    begin = time.perf_counter()
    for _ in range(STEPS):
        time.sleep(COMPUTE)
        dist.all_reduce(data)
    return time.perf_counter() - begin, ourddp.stats(recent=False) - before


def measure(rank: int, world: int, path: str, trials: int) -> list[tuple[bool, float, float]]:
    """Make the trials. Return of each whether the link was named, the predicted saving, and the measured one."""
    random_delays = random.Random(1)
    data = torch.ones(256)
    with open(path, "r+b") as file:
        delay = mmap.mmap(file.fileno(), 8)
    results = []
    for _ in range(trials):
        chosen = SHORTEST * (LONGEST / SHORTEST) ** random_delays.random()
        delay[:8] = struct.pack("d", 0)
        steps(data)
        without, _ = steps(data)
        delay[:8] = struct.pack("d", chosen / 2)
        steps(data)  # the link is slow from here on
        late, stats = steps(data)
        named = stats.slowest == (1 - rank if rank < 2 else None)
        results.append((named, max(stats.late) / late, (late - without) / late))
    return results


def main() -> int:
    """Make the hosts and the trials, and print the result. Return 1 if less than 99 % were named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=20)
    trials = parser.parse_args().trials
    over = threading.Event()
    with contextlib.ExitStack() as stack:
        hosts = stack.enter_context(networks.linked_hosts(3))
        file = stack.enter_context(tempfile.NamedTemporaryFile())
        file.truncate(8)
        delay = mmap.mmap(file.fileno(), 8)
        ends = open_end(hosts[0], hosts[1]), open_end(hosts[1], hosts[0])
        thread = threading.Thread(target=forward, args=(ends, delay, over))
        thread.start()
        stack.callback(thread.join)
        stack.callback(over.set)
        all_of_them = ranks.run_ranks(3, measure, file.name, trials, nodes=hosts, timeout=30 + 10 * trials)
    named = sum(all(one[0] for one in trial) for trial in zip(*all_of_them, strict=True))
    ends_of_link = list(zip(*all_of_them[:2], strict=True))
    predicted = [statistics.mean(one[1] for one in trial) for trial in ends_of_link]
    measured = [statistics.mean(one[2] for one in trial) for trial in ends_of_link]
    errors = [abs(p - m) / m for p, m in zip(predicted, measured, strict=True)]
    near = sum(error <= 0.1 for error in errors)
    print(f"link: named by both ends, and nobody by the third rank, in {named} of {trials} trials")
    print(f"  saving predicted / measured: {sum(predicted) / sum(measured):.3f} over all trials; off by", end=" ")
    print(f"{statistics.median(errors):.1%} (median), by at most 10% in {near} of {trials}")
    return 0 if named >= 0.99 * trials else 1


if __name__ == "__main__":
    sys.exit(main())
