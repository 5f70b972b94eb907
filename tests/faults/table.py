"""The table of a campaign: a row for each injection, with a column for each place."""

from __future__ import annotations

import statistics
from collections import Counter
from dataclasses import dataclass, field

from faults.injections import DIES, STOPS
from faults.judge import FAULTS, Outcome


@dataclass
class Row:
    """The trials of an injection."""

    effect: str
    tried: Counter[str] = field(default_factory=Counter)  # by place
    held: Counter[str] = field(default_factory=Counter)  # by place
    faults: Counter[str] = field(default_factory=Counter)
    delays: list[float] = field(default_factory=list)
    notes: Counter[str] = field(default_factory=Counter)

    def add(self, place: str, outcome: Outcome, faults: set[str]) -> None:
        """Count a trial; ``faults`` are what did not hold in it."""
        self.faults.update(faults)
        if outcome.void:  # it is tried again
            self.notes["tried again, since the machine stood still"] += 1
            return
        self.tried[place] += 1
        self.held[place] += not faults
        self.delays += outcome.delays()
        if outcome.note:
            self.notes[outcome.note] += 1


def _cells(row: Row, places: list[str]) -> list[str]:
    counts = [f"{row.held[place]} of {row.tried[place]}" if row.tried[place] else "" for place in places]
    times = [f"{statistics.median(row.delays):.2f}", f"{max(row.delays):.2f}"] if row.delays else ["", ""]
    notes = [f"{what}: {count}" for what, count in (row.faults + row.notes).items()]
    return [row.effect, *counts, *times, "; ".join(notes)]


def print_table(rows: dict[str, Row], places: list[str]) -> None:
    """Print the rows, by the names of injections, as a table of Markdown, and what they add up to."""
    head = ["what is done", "what has to come of it", *places, "median s", "longest s", "notes"]
    print("\n| " + " | ".join(head) + " |")
    print("|" + " --- |" * len(head))
    for name, row in rows.items():
        print(f"| {name} | {' | '.join(_cells(row, places))} |")
    deadly = sum(row.tried.total() for name, row in rows.items() if row.effect in (DIES, STOPS) or "SIGSTOP" in name)
    print(f"\n{sum(row.tried.total() for row in rows.values())} trials, of which {deadly} killed or stopped a rank")
    print(", ".join(f"{kind}: {sum(row.faults[kind] for row in rows.values())}" for kind in FAULTS))
