"""What recording a timeline costs: steps of a small GPT-like model with it and without it, in turns.

    torchrun --nproc_per_node=2 benchmarks/timeline.py

Prints the medians of a step over the ranks, and exits with 1 if recording takes 2 % of a step or more.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist

import ourddp

LIMIT = 0.02


def make_model(width: int, layers: int) -> torch.nn.Module:
    """Return a stack of the layers that transformers spend their time in."""
    parts: list[torch.nn.Module] = []
    for _ in range(layers):
        parts += [torch.nn.LayerNorm(width), torch.nn.Linear(width, 4 * width), torch.nn.GELU()]
        parts += [torch.nn.Linear(4 * width, width)]
    return torch.nn.Sequential(*parts)


def main() -> int:
    """Measure, print and judge."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=40, help="of each kind")
    parser.add_argument("--steps", type=int, default=10, help="a round")
    parser.add_argument("--width", type=int, default=256)
    chosen = parser.parse_args()
    launch = ourddp.init()
    torch.set_num_threads(1)
    model = ourddp.DistributedDataParallel(make_model(chosen.width, 4), bucket_cap_mb=1)
    batch = torch.randn(64, chosen.width)
    times: dict[str, list[float]] = {"off": [], "on": []}
    with tempfile.TemporaryDirectory() as folder:
        paths: list[str] = [folder]
        dist.broadcast_object_list(paths)
        for turn in range(2 * chosen.rounds):
            kind = ("off", "on")[(turn + turn // 2) % 2]
            path = Path(paths[0]) / "trace.json"
            with ourddp.timeline(path) if kind == "on" else contextlib.nullcontext():
                for _ in range(chosen.steps):
                    begin = time.perf_counter()
                    model(batch).sum().backward()
                    times[kind].append(time.perf_counter() - begin)
        events = sum(1 for _ in path.open()) if launch.rank == 0 else 0
        dist.barrier()
    mine = tuple(statistics.median(times[kind]) * 1e3 for kind in ("off", "on"))
    all_of_them = [mine] * launch.world_size
    dist.all_gather_object(all_of_them, mine)
    off, on = (statistics.median(column) for column in zip(*all_of_them, strict=True))
    cost = on / off - 1
    if launch.rank == 0:
        print(f"a step without a timeline {off:.3f} ms, with one {on:.3f} ms: {cost:+.2%} (medians over the ranks);")
        print(f"{events / chosen.steps / launch.world_size:.0f} events a step and rank")
    dist.destroy_process_group()
    return int(cost >= LIMIT)


if __name__ == "__main__":
    sys.exit(main())
