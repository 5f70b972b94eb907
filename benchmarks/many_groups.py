"""Makes many groups of many ranks on this machine, and says what a group costs: seconds, descriptors, threads, memory.

    python benchmarks/many_groups.py --ranks 64 --groups 1000 --backends ours --json many_groups.json
    python benchmarks/many_groups.py --ranks 64 --groups 20

All groups have all ranks, and each is used once, for an all-reduce of 4 bytes. Descriptors and threads are the most
that any rank has in the end, beside those of the program. The memory of a group and rank is what all processes have
more than before the first group, shared pages divided among them, by groups and ranks.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import multiprocessing
import os
import queue
import re
import time
from pathlib import Path
from typing import Any

import scaffold
import torch
import torch.distributed as dist

import ourddp  # noqa: F401  (registers the backend)
from ourddp import processes
from ourddp.bench import harness
from ourddp.bench import report as reports

BACKENDS = ("ours", "gloo")
TIMEOUT = datetime.timedelta(minutes=10)


def entries(kind: str) -> int:
    """Return how many descriptors ("fd") or threads ("task") this process has."""
    return len(os.listdir(f"/proc/self/{kind}"))


def memory() -> int:
    """Return this process's memory in bytes: its own pages, and its part of those that it shares."""
    return 1024 * int(re.findall(r"^Pss:\s+(\d+)", Path("/proc/self/smaps_rollup").read_text(), re.MULTILINE)[0])


def over_ranks(number: int, operation: Any = dist.ReduceOp.SUM) -> float:
    """Return the sum of what the ranks give, or the most, over the default group."""
    numbers = torch.tensor([number], dtype=torch.int64)
    dist.all_reduce(numbers, operation)
    return float(numbers)


def run_rank(rank: int, backend: str, plan: argparse.Namespace, ports: Any, results: Any) -> None:
    """Make the groups; rank 0 reports what they took."""
    os.environ.update(LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(plan.ranks))
    torch.set_num_threads(1)
    descriptors, threads = entries("fd"), entries("task")
    port = ports.get()
    began = time.perf_counter()
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=TIMEOUT)
    dist.init_process_group(backend, store=store, rank=rank, world_size=plan.ranks, timeout=TIMEOUT)
    over_ranks(1)
    joined = time.perf_counter()
    before = over_ranks(memory())
    begun = time.perf_counter()
    groups = []
    for _ in range(plan.groups):
        groups.append(dist.new_group())
        one = torch.ones(1)
        dist.all_reduce(one, group=groups[-1])
        if one.item() != plan.ranks:
            raise RuntimeError(f"the sum of {plan.ranks} ones is {one.item()}")
    ended = time.perf_counter()
    row = {
        "backend": backend,
        "init_seconds": joined - began,
        "group_seconds": (ended - begun) / plan.groups,
        "descriptors": over_ranks(entries("fd") - descriptors, dist.ReduceOp.MAX),
        "threads": over_ranks(entries("task") - threads, dist.ReduceOp.MAX),
        "bytes": (over_ranks(memory()) - before) / plan.groups / plan.ranks,
    }
    if rank == 0:
        results.put(row)
    dist.destroy_process_group()


def measure(backend: str, plan: argparse.Namespace) -> dict[str, Any]:
    """Return the row of a backend. Raises RuntimeError if a rank fails."""
    # Copies of this process, in which torch is loaded already. It must have one thread when it is copied, so the store
    # comes afterwards: a lock that another thread holds would stay locked in a copy.
    context = multiprocessing.get_context("fork")
    ports, results = context.SimpleQueue(), context.Queue()
    ranks = [
        context.Process(target=run_rank, args=(rank, backend, plan, ports, results), daemon=True)
        for rank in range(plan.ranks)
    ]
    for process in ranks:
        process.start()
    # In no rank's process: its descriptors would be counted there.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=TIMEOUT)
    for _ in ranks:
        ports.put(store.port)
    try:
        row = first_of(results, ranks)
    except RuntimeError as error:
        for process in ranks:
            process.kill()  # the others wait for it
        raise RuntimeError(f"{error} with {backend}") from None
    for rank, process in enumerate(ranks):
        process.join(TIMEOUT.total_seconds())
        if process.exitcode != 0:
            raise RuntimeError(f"rank {rank} with {backend} did not end well")
    return row


def first_of(results: Any, ranks: list[Any]) -> dict[str, Any]:
    """Return the first of the results. Raises RuntimeError if a rank fails before it comes."""
    while True:
        with contextlib.suppress(queue.Empty):
            return results.get(timeout=1)
        for rank, process in enumerate(ranks):
            if process.exitcode:  # one that ends well has put it there before
                raise RuntimeError(f"rank {rank} failed")


def main() -> int:
    """Run the program."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--groups", type=int, default=20)
    parser.add_argument("--backends", default=",".join(BACKENDS))
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the results there")
    plan = parser.parse_args()
    scaffold.require_known(parser, plan.backends, BACKENDS)
    rows = [measure(backend, plan) for backend in plan.backends.split(",")]
    print(f"{plan.groups} groups of {plan.ranks} ranks")
    reports.print_table(
        ["", "init", "a group", "descriptors", "threads", "memory of a group and rank"],
        [
            [
                row["backend"],
                reports.show_seconds(row["init_seconds"]),
                reports.show_seconds(row["group_seconds"]),
                f"{row['descriptors']:g}",
                f"{row['threads']:g}",
                f"{row['bytes'] / 1024:.0f} KiB",
            ]
            for row in rows
        ],
    )
    if plan.json:
        facts = {"machine": harness.machine(), "cores": processes.cores(), "torch": torch.__version__}
        scaffold.write_json({**facts, "ranks": plan.ranks, "groups": plan.groups, "rows": rows}, plan.json)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
