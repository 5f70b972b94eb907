"""The table of a campaign: a row for each injection and place."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from faults.judge import Outcome


@dataclass
class Row:
    """The trials of an injection in a place."""

    injection: str
    place: str
    tried: int = 0
    void: int = 0
    held: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    delays: list[float] = field(default_factory=list)
    notes: Counter[str] = field(default_factory=Counter)
    effect: str = ""

    def add(self, outcome: Outcome, faults: set[str]) -> None:
        """Count a trial; ``faults`` are what did not hold in it."""
        self.effect = outcome.injection.effect
        if outcome.void:  # it is tried again
            self.void += 1
            self.faults.update(faults)
            return
        self.tried += 1
        self.held += not faults
        self.faults.update(faults)
        self.delays += outcome.delays()
        if outcome.note:
            self.notes[outcome.note] += 1


def _seconds(delays: list[float]) -> list[str]:
    if not delays:
        return ["", ""]
    ordered = sorted(delays)
    return [f"{ordered[len(ordered) // 2]:.2f}", f"{ordered[-1]:.2f}"]


def print_table(rows: list[Row], faults: Sequence[str]) -> None:
    """Print the rows as a table of Markdown."""
    head = ["what was done", "where", "what has to come of it", "tried", "held", *faults]
    head += ["median s", "longest s", "note"]
    print("\n| " + " | ".join(head) + " |")
    print("|" + " --- |" * len(head))
    for row in rows:
        notes = [f"{note}: {count}" for note, count in row.notes.items()]
        notes += [f"the machine stood still: {row.void}"] if row.void else []
        counts = [str(row.faults[fault]) for fault in faults]
        cells = [row.injection, row.place, row.effect, str(row.tried), str(row.held), *counts, *_seconds(row.delays)]
        print("| " + " | ".join([*cells, "; ".join(notes)]) + " |")
    total = sum(row.tried for row in rows)
    print(f"\n{total} trials, of which {sum(row.held for row in rows)} held")
