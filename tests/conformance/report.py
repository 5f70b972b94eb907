"""Outcomes of the suite: what they are kept in, how they are printed and compared."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path

PASS, SKIP = "pass", "skip"


@dataclass(frozen=True)
class Outcome:
    """How one test ended ("pass", "skip", "fail", "timeout", "crash"); ``detail`` is the skip's reason or the error."""

    test: str
    outcome: str
    seconds: float
    detail: str = ""
    log: str = ""

    @property
    def line(self) -> str:
        """One line for people."""
        why = f"  ({self.detail})" if self.outcome == SKIP else ""
        return f"{self.outcome:8}{self.seconds:7.1f} s  {self.test}{why}"


Results = dict[int, list[Outcome]]  # by world size


def summary(world_size: int, outcomes: list[Outcome]) -> str:
    """Counts of one world size."""
    counts = Counter(o.outcome for o in outcomes)
    parts = ", ".join(f"{counts[name]} {name}" for name in ("pass", "fail", "timeout", "crash", "skip") if counts[name])
    return f"world size {world_size}: {len(outcomes)} tests: {parts}; {sum(o.seconds for o in outcomes):.0f} s"


def passed(results: Results) -> dict[int, list[str]]:
    """Names of the passed tests for each world size, sorted."""
    return {size: sorted(o.test for o in outcomes if o.outcome == PASS) for size, outcomes in results.items()}


def missing(results: Results, baseline: dict[int, list[str]]) -> dict[int, list[str]]:
    """Tests that ran and did not pass here though they are in the baseline."""
    lost = {}
    for size, outcomes in results.items():
        expected = set(baseline.get(size, ()))
        lost[size] = sorted(o.test for o in outcomes if o.outcome != PASS and o.test in expected)
    return lost


def load_baseline(path: Path) -> dict[int, list[str]]:
    """Read the names by world size that ``save_baseline`` wrote."""
    return {int(size): names for size, names in json.loads(path.read_text())["passes"].items()}


def save_baseline(path: Path, torch_version: str, results: Results) -> None:
    """Write the names of the passed tests; other world sizes that the file holds already stay."""
    names = load_baseline(path) if path.exists() else {}
    names.update(passed(results))
    content = {"torch": torch_version, "backend": "gloo", "passes": {str(size): names[size] for size in sorted(names)}}
    path.write_text(json.dumps(content, indent=1) + "\n")


def save_results(path: Path, results: Results) -> None:
    """Write every outcome with its error and the ranks' output."""
    path.write_text(
        json.dumps({str(size): [asdict(o) for o in outcomes] for size, outcomes in results.items()}, indent=1)
    )
