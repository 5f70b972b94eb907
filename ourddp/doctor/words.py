"""Words in which checks speak of ranks, hosts and values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ourddp.doctor.facts import Facts
from ourddp.doctor.meeting import Job

OK, WARNING, PROBLEM = "ok", "warning", "problem"  # the states that a check finds
MOST_NAMED = 3  # hosts or pairs that a sentence names


def count(number: int, what: str) -> str:
    """Return a number of things in words, such as "2 cores"."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def ranks(numbers: Sequence[int]) -> str:
    """Return numbers of ranks in words, such as "ranks 1, 4 to 7"."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    shown = [f"{run[0]} to {run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs]
    return ("rank " if len(numbers) == 1 else "ranks ") + ", ".join(shown)


def named(some: Iterable[Facts]) -> str:
    """Return the name of the first rank, and how many more there are."""
    first, *others = some
    return first.name() + (f" (and {len(others)} more)" if others else "")


def hosts(some: Sequence[Facts]) -> str:
    """Return the hosts' names."""
    more = f" and {len(some) - MOST_NAMED} more" if len(some) > MOST_NAMED else ""
    return ", ".join(each.host for each in some[:MOST_NAMED]) + more


def interface(facts: Facts, address: str) -> str:
    """Return an address with the name of its interface, such as "eth0 10.0.0.1"."""
    name = next((name for name, own, *_ in facts.interfaces if own == address), "")
    return f"{name} {address}".strip()


def by_value(job: Job, value: Callable[[Facts], Any]) -> dict[str, list[int]]:
    """Return the ranks that have each value, the most common one first."""
    found: dict[str, list[int]] = {}
    for rank in sorted(job.facts):
        found.setdefault(str(value(job.facts[rank])), []).append(rank)
    return dict(sorted(found.items(), key=lambda item: -len(item[1])))


def sides(found: dict[str, list[int]]) -> str:
    """Return which ranks have which value, such as "1 on ranks 0 to 2 but 2 on rank 3"."""
    return " but ".join(f"{value or 'empty'} on {ranks(some)}" for value, some in found.items())
