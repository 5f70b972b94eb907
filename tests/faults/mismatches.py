"""Ranks whose calls or models differ: runs the cases that the tests have, on other ranks and in other places."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass

from invalid_calls import NAMES, hear_of_an_invalid_call
from mismatch_cases import CASES, DIFFERENCES, build_different, check, check_difference, mismatch
from ranks import Nodes, RankPool

from faults.campaign import WORLD


@dataclass
class Line:
    """What came of one kind of mismatch in a place."""

    what: str
    place: str
    tried: int = 0
    held: int = 0
    slowest: float = 0.0  # seconds to the error, beyond the timeout if a rank does not come


def kinds() -> list[str]:
    """Return the names of all kinds."""
    invalid = [f"invalid on rank 0: {name}" for name in NAMES]
    return [*(f"calls: {name}" for name in CASES), *invalid, *(f"models: {name}" for name in DIFFERENCES)]


def try_kind(pool: RankPool, kind: str, one_node: bool, rng: random.Random) -> float:
    """Try a kind once. Return the seconds until the last error; raise AssertionError for what did not hold."""
    what, _, name = kind.partition(": ")
    if what == "calls":
        odd = rng.randrange(WORLD)
        return check(name, odd, one_node, pool.run(mismatch, name, odd))
    start = time.monotonic()
    if what == "models":
        check_difference(name, pool.run(build_different, name))
    else:
        pool.run(hear_of_an_invalid_call, name, rng.random() < 0.5)
    return time.monotonic() - start


def try_all(place: str, nodes: Nodes, rounds: int, seed: int) -> list[Line]:
    """Try all kinds in a place, each ``rounds`` times."""
    lines = []
    with RankPool(WORLD, nodes=nodes) as pool:
        for kind in kinds():
            line = Line(kind, place)
            for number in range(rounds):
                line.tried += 1
                try:
                    seconds = try_kind(pool, kind, nodes == 1, random.Random(f"{seed} {kind} {place} {number}"))
                except AssertionError as error:
                    print(f"  {kind}, {place}: {error}", flush=True)
                else:
                    line.held += 1
                    line.slowest = max(line.slowest, seconds)
            lines.append(line)
    return lines


def print_lines(lines: list[Line]) -> int:
    """Print a table of Markdown: a row for each kind, with its places. Return how many trials did not hold."""
    places = list(dict.fromkeys(line.place for line in lines))
    print("\n| what differs | " + " | ".join(places) + " | slowest s |")
    print("|" + " --- |" * (len(places) + 2))
    for kind in kinds():
        row = [line for line in lines if line.what == kind]
        counts = [f"{line.held} of {line.tried}" for line in row]
        print(f"| {kind} | {' | '.join(counts)} | {max(line.slowest for line in row):.2f} |")
    failed = sum(line.tried - line.held for line in lines)
    print(f"\n{sum(line.tried for line in lines)} mismatches, of which {failed} did not hold")
    return failed
