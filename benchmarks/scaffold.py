"""What the benchmark programs have in common: their flags, their start as a program or as a rank, their files.

A benchmark calls `harness.run_ranks([__file__], plan, ...)`, which starts the same file again in every rank; there
`start` runs its other function, which works inside `with harness.StartedRanks() as ranks`.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from ourddp.bench import harness
from ourddp.bench import report as reports


def argument_parser(doc: str, *, seconds: float, of: str = "", picture: bool = False) -> argparse.ArgumentParser:
    """Return a parser with the flags for how long to measure, by default `seconds` `of` something, and for the results.

    Its help begins with the first paragraph of `doc`.
    """
    parser = argparse.ArgumentParser(
        description=doc.split("\n\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--time-budget", type=float, default=seconds, help=f"seconds of measuring, about{of}")
    parser.add_argument("--machine", default=harness.machine(), help="what the results say they were measured on")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the results there")
    if picture:
        parser.add_argument("--plot", type=Path, metavar="PATH", help="write a picture (PNG, SVG or PDF) there")
    return parser


def require_known(parser: argparse.ArgumentParser, chosen: str, known: Collection[str]) -> None:
    """End the program unless each of `chosen`, separated by commas, is known."""
    unknown = set(chosen.split(",")) - set(known)
    if unknown:
        parser.error(f"there is no {', '.join(sorted(unknown))}; choose from {', '.join(known)}")


def start(main: Callable[[], int], rank_main: Callable[[], None]) -> None:
    """Run `rank_main` in the ranks that run_ranks started, and otherwise the program, which ends then."""
    if not is_rank():
        sys.exit(main())
    rank_main()


def is_rank() -> bool:
    """Return whether this process is one of the ranks that run_ranks started."""
    return harness.FOLDER in os.environ


def plot_collectives(report: dict[str, Any], path: Path) -> None:
    """Draw time over size, both logarithmic, one panel for each number of ranks, collective and way of calling."""
    # A single size, such as barrier's, makes no curve.
    panels = [
        (run, case) for run in report["runs"] for case in reports.cases_of([row for row in run["rows"] if row["size"]])
    ]
    columns = min(4, max(1, len(panels)))
    lines = max(1, -(-len(panels) // columns))
    with reports.picture(
        path, f"Median time of a collective, {reports.source_of(report)}", lines, columns, 3.4
    ) as axes:
        for axis in axes[len(panels) :]:
            axis.axis("off")
        for axis, (run, case) in zip(axes, panels, strict=False):
            reports.draw_collective(axis, run, *case)


def write_json(report: dict[str, Any], path: Path) -> None:
    """Write a report, making its folder if needed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1) + "\n")
