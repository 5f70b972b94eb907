"""The program: its arguments, which trials it runs, and the tables that it prints."""

from __future__ import annotations

import argparse
import contextlib
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from hosts import linked_hosts, why_no_hosts
from ranks import Nodes, fork_server

from faults.campaign import Trial, Trials
from faults.injections import INJECTIONS
from faults.job import PARTS, RESTART
from faults.judge import Outcome, judge
from faults.mismatches import Line, print_lines, try_all
from faults.table import Row, print_table

PLACES = ["one node", "two nodes", "four nodes", "two hosts"]
LEFT_EVERY = 20  # trials after which the ranks count what they have


@contextlib.contextmanager
def nodes_of(place: str) -> Iterator[Nodes]:
    """Make the nodes of a place."""
    counts = {"one node": 1, "two nodes": 2, "four nodes": 4}
    if place in counts:
        yield counts[place]
        return
    with linked_hosts(2) as hosts:
        yield hosts


@contextlib.contextmanager
def trials_in(place: str) -> Iterator[Trials]:
    """Make the trials of a place."""
    with nodes_of(place) as nodes, contextlib.closing(Trials(nodes)) as trials:
        trials.learn_what_is_usual()
        yield trials


@dataclass
class Tally:
    """What came of the trials so far."""

    rows: dict[str, Row] = field(default_factory=dict)  # by the names of injections
    faults: int = 0

    def add(self, name: str, place: str, number: int, outcome: Outcome) -> None:
        row = self.rows.setdefault(name, Row(outcome.injection.effect))
        found = judge(outcome)
        row.add(place, outcome, {kind for kind, _ in found})
        for kind, text in found:
            self.faults += 1
            where = f"{outcome.part}, rank {outcome.victim} hit in {outcome.doing or 'its start'}"
            print(f"  {kind}: {name}, {place}, trial {number} ({where}): {text}", flush=True)


def seed_of(seed: int, name: str, place: str, number: int) -> int:
    """Return the seed of one trial."""
    return random.Random(f"{seed} {name} {place} {number}").getrandbits(32)


def trial_of(options: argparse.Namespace, name: str, place: str, number: int) -> Trial:
    """Return the trial of this number. Trials take turns in the parts of the job."""
    injection = INJECTIONS[name]
    parts = [part for part in injection.parts if part in (options.part or injection.parts)]
    return Trial(injection, parts[number % len(parts)], seed_of(options.seed, name, place, number))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Disturb a job of real ranks at random moments, and print what held.")
    parser.add_argument("--trials", type=int, default=10, help="of an injection in a place; some are tried more often")
    parser.add_argument("--first", type=int, default=0, help="the number of the first trial of each injection")
    parser.add_argument("--minutes", type=float, help="try random injections for so long instead")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--only", action="append", choices=list(INJECTIONS), help="this injection; may be repeated")
    parser.add_argument("--place", action="append", choices=PLACES, help="this place; may be repeated")
    parser.add_argument("--mismatches", type=int, default=2, help="of each kind in a place; 0: none")
    parser.add_argument("--part", action="append", choices=[*PARTS, RESTART], help="this part of the job")
    return parser.parse_args()


def chosen(options: argparse.Namespace, place: str) -> tuple[list[str], dict[str, str]]:
    """Return the names of the injections for a place, and why others are skipped."""
    parts = {*(options.part or [*PARTS, RESTART])}
    names = [
        name
        for name in options.only or INJECTIONS
        if place in INJECTIONS[name].places and parts.intersection(INJECTIONS[name].parts)
    ]
    skipped = {name: reason for name in names if (reason := INJECTIONS[name].why_not())}
    return [name for name in names if name not in skipped], skipped


def numbers(options: argparse.Namespace, names: list[str], place: str) -> Iterator[tuple[str, int]]:
    """Yield injections and the numbers of their trials."""
    if options.minutes is None:
        for name in names:
            count = max(1, round(options.trials * INJECTIONS[name].share))
            yield from ((name, options.first + number) for number in range(count))
        return
    places = len(options.place or PLACES)
    end = time.monotonic() + 60 * options.minutes / places
    rng = random.Random(f"{options.seed} {place}")
    number = options.first
    while time.monotonic() < end:
        yield rng.choices(names, [INJECTIONS[name].share for name in names])[0], number
        number += 1


def campaign(options: argparse.Namespace, place: str, tally: Tally) -> dict[str, str]:
    """Run all trials of a place. Return why injections were skipped."""
    names, skipped = chosen(options, place)
    if not names:
        return skipped
    with trials_in(place) as trials:
        last = ""
        for count, (name, number) in enumerate(numbers(options, names, place), 1):
            if name != last and options.minutes is None:
                print(f"{place}: {name}", flush=True)
                last = name
            trial = trial_of(options, name, place, number)
            outcome = trials.run(trial)
            if outcome.void:
                tally.add(name, place, number, outcome)
                outcome = trials.run(trial)
            if count % LEFT_EVERY == 0:
                outcome.left += trials.left_behind()
            tally.add(name, place, number, outcome)
        for text in trials.left_behind():
            tally.faults += 1
            print(f"  left behind, {place}, at the end: {text}", flush=True)
    return skipped


def mismatches(options: argparse.Namespace, places: list[str]) -> int:
    """Try ranks whose calls differ. Return how many trials did not hold."""
    lines: list[Line] = []
    for place in places:
        print(f"{place}: mismatches", flush=True)
        with nodes_of(place) as nodes:
            lines += try_all(place, nodes, options.mismatches, options.seed)
    return print_lines(lines)


def main() -> int:
    """Run the campaign. Return the exit status."""
    options = arguments()
    fork_server().set_forkserver_preload(["torch._dynamo", "torch.distributed.tensor", "faults.rank"])
    print(f"seed {options.seed}", flush=True)
    tally, skipped = Tally(), {}
    begun = time.monotonic()
    places = options.place or PLACES
    if "two hosts" in places and (reason := why_no_hosts()):
        skipped["two hosts"] = reason
        places = [place for place in places if place != "two hosts"]
    for place in places:
        skipped |= campaign(options, place, tally)
    print_table(tally.rows, places)
    if options.mismatches and not options.only:
        tally.faults += mismatches(options, places)
    for name, reason in skipped.items():
        print(f"skipped: {name}: {reason}")
    print(f"{tally.faults} findings in {time.monotonic() - begun:.0f} s")
    return 1 if tally.faults else 0
