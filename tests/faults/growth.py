"""Watch ranks that do the same for long, and print what of theirs grows.

    make leaks                                                           # all loads in all places: many minutes
    make leaks ARGS='--only groups --place "two nodes" --groups 100'

The exit status is 1 if something grows.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from dataclasses import dataclass

from ranks import RankPool, RanksFailedError

from faults.loads import LOADS, MAKING_GROUPS
from faults.samples import Sample, watch

PLACES = {"one node": 1, "two nodes": 2}
POINTS = 10  # samples of a run; the second half of them is judged

# By how much an amount may seem to grow over the second half of a run. Caches and fragments come and go.
TOLERANCES = {
    "malloc": 48 << 10,
    "own memory": 8 << 20,
    "shared memory": 1 << 20,
    "objects": 500,  # the samples themselves are some
    "mappings": 24,
}

# A queue starts a second thread when the first is in a callback, and may keep it; and a group that has just been made
# watches those neighbours that were there before it.
SPARE = Counter({"thread ours_comm": 2, "descriptor of anon_inode": 2})

# torch's flight recorder keeps the last calls. It is small here so that it is full before anything is judged.
ENVIRONMENT = {"TORCH_FR_BUFFER_SIZE": "50"}


def slope(points: list[tuple[int, int]]) -> float:
    """Return the slope of the line through the points with the least squares."""
    mean_x = sum(x for x, _ in points) / len(points)
    mean_y = sum(y for _, y in points) / len(points)
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / spread


@dataclass
class Trend:
    """What became of a process over the second half of a run."""

    counts: Counter[str]  # of what there is more than before
    growth: dict[str, float]  # of the amounts in a step


def trend_of(samples: list[Sample]) -> Trend:
    """Return what the second half of the samples shows."""
    half = samples[len(samples) // 2 :]
    growth = {name: slope([(each.steps, each.amounts[name]) for each in half]) for name in TOLERANCES}
    return Trend(half[-1].counts - half[0].counts - SPARE, growth)


def judge(samples: list[Sample]) -> list[str]:
    """Return what grows in a process, each as a sentence."""
    trend = trend_of(samples)
    steps = samples[-1].steps - samples[len(samples) // 2].steps
    found = [f"{count} more after {steps} steps: {what}" for what, count in trend.counts.items()]
    for name, each in trend.growth.items():
        if each * steps > TOLERANCES[name]:
            found.append(f"{name} grows by {each:.1f} in each step, in {steps} steps by {each * steps:.0f}")
    return found


def points_of(steps: int) -> list[int]:
    """Return the numbers of steps after which there are samples."""
    return [steps * (point + 1) // POINTS for point in range(POINTS)]


# --- the program -----------------------------------------------------------------------------------------------------

KINDS = ("descriptor", "mapping", "thread")


def _cells(results: list[list[Sample]]) -> list[str]:
    """Return what the table says of a run: the counts of all ranks, and the rank of which an amount grows the most."""

    def total(sample: int, kind: str) -> int:
        counts = [ranks[sample].counts for ranks in results]
        return sum(count for each in counts for what, count in each.items() if what.startswith(kind))

    middle = POINTS // 2
    counts = [f"{total(0, kind)}, {total(middle, kind)}, {total(-1, kind)}" for kind in KINDS]
    trends = [trend_of(samples) for samples in results]
    return [*counts, *(f"{max(trend.growth[name] for trend in trends):.1f}" for name in TOLERANCES)]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Watch what of ranks grows that do the same for long.")
    parser.add_argument("--iterations", type=int, default=10_000, help="steps of each load")
    parser.add_argument("--groups", type=int, default=1000, help="steps of a load that makes groups")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--only", action="append", choices=list(LOADS), help="this load; may be repeated")
    parser.add_argument("--place", action="append", choices=list(PLACES), help="this place; may be repeated")
    return parser.parse_args()


def main() -> int:
    options = arguments()
    faults = 0
    head = ["load", "place", "ranks", "steps", "seconds", *(f"{kind}s: first, middle, last" for kind in KINDS)]
    head += [f"{name} a step" for name in TOLERANCES]
    print("| " + " | ".join(head) + " |\n|" + " --- |" * len(head), flush=True)
    for name in options.only or LOADS:
        steps = options.groups if name in MAKING_GROUPS else options.iterations
        for place in options.place or PLACES:
            began = time.monotonic()
            try:
                with RankPool(options.ranks, nodes=PLACES[place], env=ENVIRONMENT, pg_timeout=300) as pool:
                    results = pool.run(watch, LOADS[name], points_of(steps), timeout=3600)
            except RanksFailedError as error:
                faults += 1
                print(f"  {name}, {place}: {error}", flush=True)
                continue
            seconds = f"{time.monotonic() - began:.0f}"
            row = [name, place, str(options.ranks), str(steps), seconds, *_cells(results)]
            print("| " + " | ".join(row) + " |", flush=True)
            for rank, samples in enumerate(results):
                for fault in judge(samples):
                    faults += 1
                    print(f"  {name}, {place}, rank {rank}: {fault}", flush=True)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
