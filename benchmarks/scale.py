"""Predicts how long an all-reduce takes on more machines than there are, and where algorithms overtake each other.

    python benchmarks/scale.py                                   # 8 to 16,384 ranks, 8 a node, 10 Gbit/s
    python benchmarks/scale.py --gbit 100 --latency 5e-6 --local-ranks 4 --bytes 64K,25M
    python benchmarks/scale.py --check measured.json             # the model beside measurements of between_hosts.py
    python benchmarks/scale.py --published                       # beside what others have published

The model is Hockney's, a message of n bytes takes latency + n / bandwidth (alpha + n beta), with LogP's overhead, the
time that a core spends on each message. Each host has one link, used in both directions at once and shared by its
ranks. Costs of the algorithms by Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations
in MPICH" (2005), and Patarasu and Yuan, "Bandwidth Optimal All-reduce Algorithms for Clusters of Workstations" (2009).
Memory is a link as well: in a node, every byte of every rank is read and written once, at --memory bytes per second.
many_ranks.py checks another thing: whether the time of 64 and 128 ranks on few cores follows from what they do.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from ourddp import _C
from ourddp.bench import report as reports

SIZES = tuple(8 << i for i in range(12))  # ranks


@dataclass(frozen=True)
class Machine:
    """What the model knows of a cluster."""

    local_ranks: int  #: ranks a node
    latency: float  #: seconds from one host to another, of an empty message
    overhead: float  #: seconds that a core spends on sending or receiving one message
    bandwidth: float  #: bytes per second of a host's link, in each direction
    sync: float  #: seconds of a synchronisation in a node
    memory: float  #: bytes per second that a node's ranks read or write together


def in_node(machine: Machine, size: float) -> float:
    """Reduce-scatter and all-gather in shared memory: two synchronisations; all is read once and written once."""
    if machine.local_ranks == 1:
        return 0.0
    return 2 * machine.sync + 2 * machine.local_ranks * size / machine.memory


def parameter_server(machine: Machine, nodes: int, size: float) -> float:
    """All ranks send to one host, which sends the sum back: its link carries the bytes of all ranks on other hosts."""
    remote = (nodes - 1) * machine.local_ranks
    one_way = remote * (machine.overhead + size / machine.bandwidth)
    start = machine.latency if nodes > 1 else machine.sync
    return 2 * (start + one_way) + 2 * nodes * machine.local_ranks * size / machine.memory


def flat_ring(machine: Machine, nodes: int, size: float) -> float:
    """One ring through all ranks: 2 (P - 1) steps of 1 / P of the message, each as slow as the link between hosts."""
    ranks = nodes * machine.local_ranks
    step = machine.latency if nodes > 1 else machine.sync
    wire = size / ranks / machine.bandwidth if nodes > 1 else 0.0
    # Every rank sends what it has reduced: read twice and written, and copied once on each side of a socket.
    return 2 * (ranks - 1) * (step + max(wire, 5 * machine.local_ranks * size / ranks / machine.memory))


def by_rails(machine: Machine, nodes: int, size: float, start: float, *, ring: bool) -> float:
    """Cut chunks into a part for every rail and node, and send these: links carry bytes while cores see to messages.

    The work in the nodes overlaps with that of the links, except that of one chunk.
    """
    if nodes == 1:
        return in_node(machine, size)
    _, chunks = _C.choose_rails(nodes, machine.local_ranks, int(size), ring)
    messages = chunks * 2 * (nodes - 1)
    wire = start + max(2 * (nodes - 1) / nodes * size / machine.bandwidth, messages * machine.overhead)
    node = in_node(machine, size)
    return max(wire, node) + min(wire, node) / chunks + 2 * machine.sync


def hierarchical_ring(machine: Machine, nodes: int, size: float) -> float:
    """Rings between nodes, each for a share of the message; memory and wire work at the same time."""
    return by_rails(machine, nodes, size, 2 * (nodes - 1) * machine.latency, ring=True)


def hierarchical_direct(machine: Machine, nodes: int, size: float) -> float:
    """Like the ring, but every node sends its parts directly to their owners: as many bytes, in two steps."""
    return by_rails(machine, nodes, size, 2 * machine.latency, ring=False)


def hierarchical_doubling(machine: Machine, nodes: int, size: float) -> float:
    """Recursive doubling between nodes, for short messages: log2(N) steps of the whole message."""
    if nodes == 1:
        return in_node(machine, size)
    wire = math.ceil(math.log2(nodes)) * (machine.latency + machine.overhead + size / machine.bandwidth)
    return wire + in_node(machine, size)


def hierarchical_whole(machine: Machine, nodes: int, size: float) -> float:
    """Every node sends everything to every other, for short messages among few: one step."""
    if nodes == 1:
        return in_node(machine, size)
    wire = machine.latency + (nodes - 1) * (machine.overhead + size / machine.bandwidth)
    return wire + in_node(machine, size)


def choice(machine: Machine, nodes: int, size: float) -> str:
    """Return the algorithm that the built-in table chooses."""
    return _C.choose_algorithm("all_reduce", nodes, machine.local_ranks, int(size))


Model = Callable[[Machine, int, float], float]
ALGORITHMS: dict[str, Model] = {
    "parameter server": parameter_server,
    "flat ring": flat_ring,
    "hierarchical ring": hierarchical_ring,
    "hierarchical direct": hierarchical_direct,
    "hierarchical doubling": hierarchical_doubling,
    "hierarchical whole": hierarchical_whole,
}


def crossings(machine: Machine, size: float, one: Model, other: Model) -> list[int]:
    """Return the numbers of ranks, of SIZES, from which on the one that was faster before is the slower one."""
    found = []
    before: bool | None = None
    for ranks in SIZES:
        nodes = nodes_of(machine, ranks)
        faster = one(machine, nodes, size) < other(machine, nodes, size)
        if before is not None and faster != before:
            found.append(ranks)
        before = faster
    return found


def nodes_of(machine: Machine, ranks: int) -> int:
    """Return how many nodes so many ranks fill."""
    return max(1, -(-ranks // machine.local_ranks))


def print_predictions(machine: Machine, size: int) -> None:
    """Print a table of all algorithms and SIZES, and where they cross."""
    print(f"\nall_reduce of {reports.show_size(size)}, {machine.local_ranks} ranks a node")
    lines = []
    for ranks in SIZES:
        nodes = nodes_of(machine, ranks)
        times = {name: model(machine, nodes, size) for name, model in ALGORITHMS.items()}
        best = min(times, key=lambda name: times[name])
        choices = [best, choice(machine, nodes, size) if nodes > 1 else "-"]
        lines.append([str(ranks), *(reports.show_seconds(seconds) for seconds in times.values()), *choices])
    reports.print_table(["ranks", *ALGORITHMS, "fastest", "chosen"], lines)
    for one, other in (("parameter server", "flat ring"), ("flat ring", "hierarchical ring")):
        places = crossings(machine, size, ALGORITHMS[one], ALGORITHMS[other])
        first = min((one, other), key=lambda name: ALGORITHMS[name](machine, nodes_of(machine, SIZES[0]), size))
        text = f"cross at {', '.join(map(str, places))} ranks" if places else f"do not cross: the {first} is faster"
        print(f"{one} and {other} {text}")


def check(path: Path, machine: Machine, limit: float) -> bool:
    """Print prediction and measurement of every row of a report of between_hosts.py; return whether they agree.

    They agree if neither is more than ``limit`` times the other. A row has its own number of ranks on a node, and the
    bandwidth of its links if they have a limit; everything else is as ``machine`` says.
    """
    lines = []
    good = True
    for row in json.loads(path.read_text())["rows"]:
        bandwidth = row["mbit"] * 1e6 / 8 or machine.bandwidth
        here = replace(machine, local_ranks=row["local"], bandwidth=bandwidth)
        for variant, seconds in row["seconds"].items():
            model = ALGORITHMS.get(variant) or ALGORITHMS.get(f"hierarchical {variant}")
            if model is None:
                continue
            predicted, measured = model(here, row["hosts"], row["size"]), seconds["median"]
            ratio = predicted / measured
            good = good and 1 / limit <= ratio <= limit
            cells = [variant, f"{row['hosts']} x {row['local']}", reports.show_size(row["size"])]
            times = [reports.show_seconds(measured), reports.show_seconds(predicted)]
            lines.append([*cells, *times, f"{ratio:.2f}"])
    if not lines:
        raise SystemExit(f"{path} has no measurement of what the model knows")
    reports.print_table(["algorithm", "ranks", "size", "measured", "model", "model/measured"], lines)
    return good


@dataclass(frozen=True)
class Training:
    """A training on 128 servers with 4 GPUs and 25 Gbit/s each, by Horovod, and how fast one of its GPUs is alone.

    The efficiencies are those of Horovod's README and of Sergeev and Del Balso, "Horovod: fast and easy distributed
    deep learning in TensorFlow" (2018), which say "Pascal GPUs" and nothing of how fast one was. The rates are those of
    a P100 with batches of 64, by the benchmarks that TensorFlow published in 2017 and that Horovod ran.
    """

    parameters: float  #: in float32
    rate: float  #: samples a second
    efficiency: float  #: the rate of 512 GPUs over 512 times that of one


PUBLISHED = {"Inception V3": Training(23.8e6, 142, 0.90), "VGG-16": Training(138.4e6, 154, 0.68)}
PUBLISHED_ON = Machine(4, latency=5e-6, overhead=1e-6, bandwidth=25e9 / 8, sync=5e-6, memory=1e12)
PUBLISHED_BATCH, PUBLISHED_NODES = 64, 128
FUSED = 64 << 20  # bytes that Horovod reduces at a time
# Of the computation of a step; communication can overlap with it. Assumed, as are latency, overhead and memory.
BACKWARD = 2 / 3


def efficiencies(training: Training) -> tuple[float, float]:
    """Return the least and the highest efficiency of the model: nothing overlaps, and as much as possible does."""
    computation = PUBLISHED_BATCH / training.rate
    size = 4 * training.parameters
    calls = math.ceil(size / FUSED)
    communication = calls * flat_ring(PUBLISHED_ON, PUBLISHED_NODES, size / calls)
    backward = BACKWARD * computation
    overlapped = computation - backward + max(backward, communication)
    return computation / (computation + communication), computation / overlapped


def compare_published() -> bool:
    """Print the published efficiencies and those of the model; return whether the former lie between the latter."""
    lines = []
    good = True
    for name, training in PUBLISHED.items():
        least, most = efficiencies(training)
        good = good and least <= training.efficiency <= most
        lines.append([name, *(f"{efficiency:.2f}" for efficiency in (training.efficiency, least, most))])
    reports.print_table(["512 GPUs", "published", "nothing overlaps", "all of backward does"], lines)
    return good


def parse_arguments() -> argparse.Namespace:
    """Return the checked command line."""
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--local-ranks", type=int, default=8, help="ranks a node")
    parser.add_argument("--gbit", type=float, default=10.0, help="bandwidth of a host's link, in 10^9 bit/s")
    parser.add_argument("--latency", type=float, default=2e-5, help="seconds from one host to another")
    parser.add_argument("--overhead", type=float, default=2e-6, help="seconds of a core for each message")
    parser.add_argument("--sync", type=float, default=5e-6, help="seconds of a synchronisation in a node")
    parser.add_argument("--memory", type=float, default=4e10, help="bytes per second of a node's memory")
    parser.add_argument("--bytes", default="4K,25M", help="sizes of the message")
    parser.add_argument("--check", type=Path, metavar="PATH", help="compare with the measurements in this file instead")
    parser.add_argument("--published", action="store_true", help="compare with published efficiencies instead")
    parser.add_argument("--limit", type=float, default=1.5, help="exit with 1 if --check finds a larger factor")
    args = parser.parse_args()
    if min(args.local_ranks, args.gbit, args.latency, args.overhead, args.sync, args.memory) <= 0 or args.limit < 1:
        parser.error("all numbers must be positive, and --limit at least 1")
    return args


def main() -> int:
    """Print the predictions, or the comparison; return the exit status."""
    args = parse_arguments()
    machine = Machine(args.local_ranks, args.latency, args.overhead, args.gbit * 1e9 / 8, args.sync, args.memory)
    if args.published:
        return 0 if compare_published() else 1
    if args.check is not None:
        return 0 if check(args.check, machine, args.limit) else 1
    for size in args.bytes.split(","):
        print_predictions(machine, reports.parse_size(size))
    return 0


if __name__ == "__main__":
    sys.exit(main())
