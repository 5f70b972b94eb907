"""How surely all ranks stop in the same step after a signal to one of them, and what that costs.

    torchrun --nproc_per_node=4 benchmarks/preemption.py --trials 100

In each trial the ranks train a small model, and one of them, each in its turn, gets SIGTERM at a random moment. A trial
is right if `ourddp.preempted()` becomes true in the same step on all ranks, at most two steps after the signal was
handled, and if the steps took as many collectives as those that do not ask for it. Exits with 1 if a trial was not.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import threading
import time

import torch
import torch.distributed as dist
from torch import nn

import ourddp
from ourddp import preemption

PLAIN_STEPS = 10  # that do not ask


def train_until_preempted(victim: int, delay: float) -> tuple[int, bool, float]:
    """Return the step in which this rank was preempted, whether it took no collective more, and the seconds it lasted.

    `victim` gets the signal `delay` seconds after its first step.
    """
    group = dist.new_group()
    layers = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    model = ourddp.DistributedDataParallel(layers, process_group=group, bucket_cap_mb=0.02)

    def step() -> None:
        model(torch.ones(8, 64)).sum().backward()

    def collectives() -> int:
        return ourddp.stats(group).begun

    step(), step()  # buckets are rebuilt after the first
    before = collectives()
    for _ in range(PLAIN_STEPS):
        step()
    each, rest = divmod(collectives() - before, PLAIN_STEPS)
    ourddp.watch_preemption()
    timer = threading.Timer(delay, os.kill, (os.getpid(), signal.SIGTERM))
    if dist.get_rank() == victim:
        timer.start()
    before, steps, asked_at = collectives(), 0, 0.0
    while True:
        step()
        steps += 1
        if not asked_at and ourddp._C.stop_requested():
            asked_at, asked_in = time.perf_counter(), steps
        if ourddp.preempted(group):
            break
    prompt = not asked_at or steps - asked_in <= 2
    unchanged = rest == 0 and collectives() - before == each * steps
    seconds = time.perf_counter() - asked_at if asked_at else 0.0
    preemption._forget()
    dist.barrier()
    dist.destroy_process_group(group)
    return steps, unchanged and prompt, seconds


def main() -> int:
    """Make the trials and print what came of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0, help="of the moments of the signals")
    chosen = parser.parse_args()
    launch = ourddp.init()
    torch.set_num_threads(1)
    moments = random.Random(chosen.seed)
    right, slowest = 0, 0.0
    for trial in range(chosen.trials):
        mine = train_until_preempted(trial % launch.world_size, moments.uniform(0, 0.05))
        of_all = [mine] * launch.world_size
        dist.all_gather_object(of_all, mine)
        right += len({step for step, _, _ in of_all}) == 1 and all(good for _, good, _ in of_all)
        slowest = max(slowest, *(seconds for _, _, seconds in of_all))
    if launch.rank == 0:
        print(
            f"{launch.world_size} ranks: the same step on all of them, and no collective more, in {right} of "
            f"{chosen.trials} trials; at most {slowest * 1e3:.1f} ms after the signal was handled"
        )
    dist.destroy_process_group()
    return 0 if right == chosen.trials else 1


if __name__ == "__main__":
    sys.exit(main())
