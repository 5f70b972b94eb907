"""Exchanges gradients through a parameter server and by all-reduce, among more and more workers.

    torchrun --nproc_per_node=8 examples/server_and_ring.py --plot scaling.png

A server receives the gradients of all workers and answers each of them, so its bytes grow with their number. In a ring,
each of n workers sends 2 (n - 1) / n times its gradients, which is less than twice, however many there are. Both are
measured in turn, with nothing to compute in between; docs/parallel/servers.md shows a result, and benchmarks/scale.py
predicts the same for many machines.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import common
import torch
import torch.distributed as dist


@dataclass
class Result:
    """What an exchange among some workers costs: seconds, and bytes through the busiest rank in both directions."""

    workers: int
    server: float
    ring: float
    server_bytes: int
    ring_bytes: int


def through_server(gradients: torch.Tensor, rank: int, workers: int) -> None:
    """Let the rank behind the workers add up the gradients, and send every worker the sum."""
    if rank < workers:
        dist.send(gradients, workers)
        dist.recv(gradients, workers)
        return
    gradients.zero_()
    incoming = torch.empty_like(gradients)
    for _ in range(workers):
        dist.recv(incoming)  # from any source
        gradients += incoming
    for answer in [dist.isend(gradients, worker) for worker in range(workers)]:
        answer.wait()


def compare(args: argparse.Namespace, rank: int, workers: int) -> Result | None:
    """Exchange gradients in both ways in turn; return the medians of the slowest rank, at ranks that take part."""
    both, ring = dist.new_group(range(workers + 1)), dist.new_group(range(workers))
    if rank > workers:
        return None
    gradients = torch.ones(args.elements)
    seconds = torch.zeros(2, args.rounds)
    for round_ in range(-1, args.rounds):  # the first one only warms up
        gradients.fill_(1)
        dist.barrier(both)
        began = time.perf_counter()
        through_server(gradients, rank, workers)
        middle = time.perf_counter()
        check(gradients, workers)
        gradients.fill_(1)
        dist.barrier(both)
        started = time.perf_counter()
        if rank < workers:
            dist.all_reduce(gradients, group=ring)
        ended = time.perf_counter()
        if rank < workers:
            check(gradients, workers)
        if round_ >= 0:
            seconds[:, round_] = torch.tensor([middle - began, ended - started])
    dist.all_reduce(seconds, dist.ReduceOp.MAX, both)
    server, all_reduce = (statistics.median(way) for way in seconds.tolist())
    size = gradients.nbytes
    return Result(workers, server, all_reduce, 2 * workers * size, 4 * (workers - 1) * size // workers)


def check(gradients: torch.Tensor, workers: int) -> None:
    """Raise RuntimeError if these are not the sum of the workers' gradients, all of which are 1."""
    if not (gradients == workers).all():
        raise RuntimeError(f"the sum of the gradients of {workers} workers is wrong: {gradients}")


def table(results: list[Result]) -> str:
    """Return the results as a table of Markdown."""
    lines = ["| workers | server | all-reduce | bytes through the server | through each rank of a ring |"]
    lines.append("| --- | --- | --- | --- | --- |")
    for each in results:
        times = f"{each.server * 1e3:.2f} ms | {each.ring * 1e3:.2f} ms"
        lines.append(f"| {each.workers} | {times} | {mib(each.server_bytes)} | {mib(each.ring_bytes)} |")
    return "\n".join(lines)


def mib(size: int) -> str:
    """Return a size in MiB."""
    return f"{size / (1 << 20):.3f} MiB"


def plot(results: list[Result], path: Path) -> None:
    """Draw the times and the bytes over the number of workers."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3.5), layout="constrained")
    times, sizes = figure.subplots(1, 2)
    workers = [each.workers for each in results]
    times.plot(workers, [each.server * 1e3 for each in results], "o-", label="server")
    times.plot(workers, [each.ring * 1e3 for each in results], "o-", label="all-reduce")
    times.set(xlabel="workers", ylabel="ms an exchange", ylim=0)
    sizes.plot(workers, [each.server_bytes / (1 << 20) for each in results], "o-", label="server")
    sizes.plot(workers, [each.ring_bytes / (1 << 20) for each in results], "o-", label="ring")
    sizes.set(xlabel="workers", ylabel="MiB through the busiest rank", ylim=0)
    for axes in (times, sizes):
        axes.legend()
    figure.savefig(path, dpi=120)


def main() -> None:
    """Read the command line, and compare."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--backend", default="ours", help="what init_process_group gets")
    parser.add_argument("--elements", type=int, default=1 << 20, help="of the gradients, in float32")
    parser.add_argument("--rounds", type=int, default=20, help="of each exchange")
    parser.add_argument("--plot", type=Path, metavar="PATH", help="draw the results into this file")
    args = parser.parse_args()
    with common.process_group(args.backend, args.plot) as (rank, ranks):
        if ranks < 3:
            raise common.Refused(f"{ranks} ranks are too few for two workers and a server: start 3 at least")
        results = [compare(args, rank, workers) for workers in range(2, ranks)]
        if rank == 0:
            print(table(results), flush=True)
            if args.plot:
                plot(results, args.plot)


if __name__ == "__main__":
    main()
