"""The conclusions of ``python -m ourddp tune`` from its measurements, and the file that it writes."""

from __future__ import annotations

import datetime
import platform
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

import ourddp

ALGORITHMS = ("whole", "doubling", "direct", "ring")
SPEEDUP = 1.05  # another algorithm must be more than so many times as fast as the one that is built in


@dataclass(frozen=True)
class Measurement:
    """The measurements of one size."""

    bytes: int  #: of each rank's array
    seconds: dict[str, float]  #: median of the slowest rank's times, by algorithm
    built_in: str  #: the algorithm that the built-in rules choose
    chosen: str


def table(found: Sequence[Measurement], nodes: int, local: int) -> str:
    """Return the text of the file: the measurements as comments, and a rule for each change."""
    now = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    lines = [
        f"# Written by python -m ourddp tune, {now}.",
        f"# {nodes} nodes of up to {local} ranks, {dist.get_world_size()} in all; ourddp {ourddp.__version__}, "
        f"torch {torch.__version__}, {platform.platform()}.",
        "# Median times of all_reduce over all rounds. The built-in choice is replaced where another algorithm is more",
        f"# than {SPEEDUP:g} times as fast by three medians: of all rounds, of the even ones and of the odd ones.",
        *(f"# {line}" for line in describe(found)),
        *rules(found, nodes, local),
    ]
    return "\n".join(lines) + "\n"


def rules(found: Sequence[Measurement], nodes: int, local: int) -> list[str]:
    """Return a rule for each run of sizes for which the same algorithm, but not the built-in one, was chosen.

    The limit between two sizes that were measured is their geometric mean. Beyond the largest nothing is changed.
    """
    lines: list[str] = []
    first = 0
    while first < len(found):
        last = first
        one = found[first]
        if one.chosen == one.built_in:
            first += 1
            continue
        while last + 1 < len(found) and found[last + 1].chosen == one.chosen != found[last + 1].built_in:
            last += 1
        line = f"all_reduce nodes={nodes} local={local}"
        if first > 0:
            line += f" bytes>={round((found[first - 1].bytes * one.bytes) ** 0.5) + 1}"
        end = found[last].bytes
        if last + 1 < len(found):
            end = round((end * found[last + 1].bytes) ** 0.5)
        lines.append(f"{line} bytes<={end} {one.chosen}")
        first = last + 1
    return lines


def describe(found: Sequence[Measurement]) -> list[str]:
    """Return a table of the measurements for people."""
    lines = ["     bytes " + "".join(f"{name:>12}" for name in ALGORITHMS) + "   chosen"]
    for one in found:
        cells = "".join(
            f"{one.seconds[name] * 1e6:>9.1f} us" if name in one.seconds else f"{'-':>12}" for name in ALGORITHMS
        )
        gain = ""
        if one.chosen != one.built_in:
            gain = f", {one.seconds[one.built_in] / one.seconds[one.chosen]:.2f} times as fast as {one.built_in}"
        lines.append(f"{one.bytes:>10} {cells}   {one.chosen}{gain}")
    return lines


def choose(times: dict[str, list[float]], built_in: str) -> str:
    """Return the fastest algorithm that beats ``built_in`` by more than SPEEDUP, or ``built_in`` if there is none.

    It has to win by the median of all rounds and by those of the even and the odd ones, since noise is unlikely to
    favour it in both. ``times`` are the seconds of each algorithm's rounds, two or more.
    """

    def medians(name: str) -> list[float]:
        return [statistics.median(times[name][begin::step]) for begin, step in ((0, 1), (0, 2), (1, 2))]

    theirs = medians(built_in)
    faster = [name for name in times if all(SPEEDUP * a < b for a, b in zip(medians(name), theirs, strict=True))]
    return min(faster or [built_in], key=lambda name: medians(name)[0])
