"""How well ourddp.stats() names the late rank, and predicts what its lateness costs.

    torchrun --nproc_per_node=2 benchmarks/stragglers.py --trials 200

In each trial one rank, each in its turn, is late by 5 to 200 ms in some steps, which come between steps without delays.
The prediction is the saving that each rank's statistics tell of the steps with delays; the measurement is how much
longer these took. A step computes, which sleeping stands for, and reduces: at its end (``sync``), or in four pieces
while it computes, for which it waits at the end (``overlap``), as a backward does.

With OURS_NODE_ID set to different values, ranks play nodes, and speak over TCP.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

import ourddp

COMPUTE = 0.02  # seconds of a step
PIECES = 4
STEPS = 5  # with delays in a trial; as many without come before and after them
SHORTEST, LONGEST = 0.005, 0.2  # seconds of a delay


def sync(data: torch.Tensor, delay: float) -> None:
    """Compute, and reduce at the end."""
    time.sleep(COMPUTE + delay)
    dist.all_reduce(data)


def overlap(data: torch.Tensor, delay: float) -> None:
    """Reduce each piece once it is computed, and wait at the end."""
    time.sleep(delay)
    works = []
    for piece in data.chunk(PIECES):
        time.sleep(COMPUTE / PIECES)
        works.append(dist.all_reduce(piece, async_op=True))
    for work in works:
        work.wait()


WAYS: dict[str, Callable[[torch.Tensor, float], None]] = {"sync": sync, "overlap": overlap}


def block(step: Callable[[torch.Tensor, float], None], data: torch.Tensor, delay: float) -> tuple[float, ourddp.Stats]:
    """Make some steps. Return how long they took, and what their collectives have cost."""
    dist.barrier()
    before = ourddp.stats(recent=False)
    begin = time.perf_counter()
    for _ in range(STEPS):
        step(data, delay)
    return time.perf_counter() - begin, ourddp.stats(recent=False) - before


def attempt(step: Callable[[torch.Tensor, float], None], victim: int, delay: float) -> tuple[bool, float, float]:
    """Let one rank be late. Return whether it was named here, the predicted saving, and the measured one."""
    data = torch.ones(100_000)
    own = delay if dist.get_rank() == victim else 0.0
    without, _ = block(step, data, 0.0)
    late, stats = block(step, data, own)
    without = (without + block(step, data, 0.0)[0]) / 2
    return stats.slowest == victim, stats.late[victim] / late, (late - without) / late


def main() -> int:
    """Make the trials, and print a line for each way. Return 1 if less than 99 % were named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=20, help="of each kind of step")
    chosen = parser.parse_args()
    launch = ourddp.init()
    delays = random.Random(1)
    good = True
    for name, step in WAYS.items():
        block(step, torch.ones(100_000), 0.0)
        named, errors, sums = 0, [], (0.0, 0.0)
        for trial in range(chosen.trials):
            delay = SHORTEST * (LONGEST / SHORTEST) ** delays.random()
            mine = attempt(step, trial % launch.world_size, delay)
            all_of_them = [mine] * launch.world_size
            dist.all_gather_object(all_of_them, mine)
            named += all(right for right, _, _ in all_of_them)
            predicted, measured = (statistics.mean(values) for values in list(zip(*all_of_them, strict=True))[1:])
            errors.append(abs(predicted - measured) / measured)
            sums = sums[0] + predicted, sums[1] + measured
        good = good and named >= 0.99 * chosen.trials
        if launch.rank == 0:
            near = sum(error <= 0.1 for error in errors)
            print(f"{name}: named by all ranks in {named} of {chosen.trials} trials")
            print(f"  saving predicted / measured: {sums[0] / sums[1]:.3f} over all trials; off by", end=" ")
            print(f"{statistics.median(errors):.1%} (median), by at most 10% in {near} of {chosen.trials}")
            sys.stdout.flush()
    dist.destroy_process_group()
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
