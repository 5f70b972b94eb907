"""Reads timelines (see ourddp/tracing.py), also those of jobs that were cut off."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ourddp.intervals import Interval

__all__ = ["Event", "Rank", "load"]


@dataclass(frozen=True)
class Event:
    """Something that lasted, in milliseconds of rank 0's clock."""

    name: str
    category: str
    thread: int
    begin: float
    end: float
    facts: dict[str, Any]

    @property
    def interval(self) -> Interval:
        """When it was."""
        return self.begin, self.end


@dataclass
class Rank:
    """What one rank recorded."""

    number: int
    title: str = ""
    main_thread: int = -1
    events: list[Event] = field(default_factory=list)

    def named(self, name: str) -> list[Event]:
        """Return the events of this name, in the order in which they began."""
        return [event for event in self.events if event.name == name]


def load(paths: Iterable[Path]) -> list[Rank]:
    """Return what the ranks of a job recorded into these files, one for each machine, by rank.

    Raises ValueError if a file is no timeline, and OSError if it cannot be read.
    """
    ranks: dict[int, Rank] = {}
    for path in paths:
        for entry in _entries(path):
            _add(ranks.setdefault(entry["pid"], Rank(entry["pid"])), entry)
    for rank in ranks.values():
        rank.events.sort(key=lambda event: (event.begin, -event.end))
    return [ranks[number] for number in sorted(ranks) if ranks[number].title]


def _entries(path: Path) -> list[dict[str, Any]]:
    lines = path.read_text(errors="replace").splitlines()
    if not lines or lines[0] != "[":
        raise ValueError(f"{path} is not a timeline: it does not begin as one that OURS_TIMELINE has written")
    entries = []
    for number, line in enumerate(lines[1:], 2):
        if line == "]":
            break
        try:
            entries.append(json.loads(line.rstrip(",")))
        except json.JSONDecodeError:
            if number != len(lines):  # the job may have been cut off in the middle of the last line
                raise ValueError(f"{path}: line {number} is no event: {line[:80]}") from None
    return entries


def _add(rank: Rank, entry: dict[str, Any]) -> None:
    if entry["ph"] == "M" and entry["name"] == "process_name":
        rank.title = entry["args"]["name"]
    elif entry["ph"] == "M" and entry["name"] == "thread_name" and entry["args"]["name"] == "main":
        rank.main_thread = entry["tid"]
    elif entry["ph"] == "X":
        begin = entry["ts"] / 1e3
        end = (entry["ts"] + entry["dur"]) / 1e3
        rank.events.append(Event(entry["name"], entry["cat"], entry["tid"], begin, end, entry.get("args", {})))
