"""What one-sided access costs, against the calls that do the same: two ranks of one node hand a message back and forth.

torchrun --nproc_per_node=2 benchmarks/symmetric_memory.py
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem

import ourddp

SIZES = (4, 64 << 10, 1 << 20, 25 << 20)


def microseconds(call: Callable[[], object], rounds: int) -> float:
    """Return the median time of a call over five series of ``rounds`` calls."""
    series = []
    for _ in range(6):  # the first one warms up
        dist.barrier()
        start = time.perf_counter()
        for _ in range(rounds):
            call()
        series.append((time.perf_counter() - start) / rounds * 1e6)
    return statistics.median(series[1:])


def main() -> None:
    """Print a table of the times of one way, half of there and back."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=200, help="messages of each series, fewer for long ones")
    arguments = parser.parse_args()
    rank = ourddp.init().rank
    assert dist.get_world_size() == 2, "this benchmark is for two ranks"
    peer = 1 - rank
    names = ("put and signal (window)", "copy and signal (symmetric memory)", "send and recv")
    if rank == 0:
        print("| Size | " + " | ".join(names) + " |\n| --- | --- | --- | --- |")
    for size in SIZES:
        source = torch.ones(size // 4)
        tensor = symm_mem.empty(size // 4, device="cpu").zero_()
        handle = symm_mem.rendezvous(tensor, dist.group.WORLD)
        there = handle.get_buffer(peer, (size // 4,), torch.float32)
        window = dist.distributed_c10d._new_window(tensor)

        def put(window: dist.Window = window, source: torch.Tensor = source) -> None:
            window.put(source, peer, 0, False)
            window.signal(peer, False)

        def copy(handle: object = handle, there: torch.Tensor = there, source: torch.Tensor = source) -> None:
            there.copy_(source)
            handle.put_signal(peer)

        ways = [
            (put, lambda window=window: window.wait_signal(peer, False)),
            (copy, lambda handle=handle: handle.wait_signal(peer)),
            (lambda source=source: dist.send(source, peer), lambda tensor=tensor: dist.recv(tensor, peer)),
        ]
        rounds = max(5, min(arguments.rounds, (256 << 20) // size))
        times = []
        for give, take in ways:
            turn = (give, take) if rank == 0 else (take, give)
            times.append(microseconds(lambda turn=turn: [step() for step in turn], rounds) / 2)
        if rank == 0:
            print(f"| {size} B | " + " | ".join(f"{value:.1f} us" for value in times) + " |", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
