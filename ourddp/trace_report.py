"""``python -m ourddp report``: one page that says why a job is not as many times faster as it has ranks."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

from ourddp import trace_page
from ourddp.trace_analysis import TraceReport, analyse
from ourddp.trace_file import load

__all__ = ["add_arguments", "run"]

HELP = "where the time of a step goes, from timelines"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what ``report`` accepts."""
    parser.add_argument("timelines", nargs="+", type=Path, metavar="FILE", help="timelines of one job, one a machine")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write the page as HTML, too")
    parser.add_argument("--png", type=Path, metavar="FILE", help="write a picture of it, too (needs matplotlib)")
    parser.add_argument(
        "--tensorboard", type=Path, metavar="FOLDER", help="write the numbers for TensorBoard, too (needs tensorboard)"
    )


def run(chosen: argparse.Namespace) -> int:
    """Print the report. Raises ValueError, with what to do, if it cannot be made or written."""
    try:
        report = analyse(load(chosen.timelines))
    except OSError as error:
        raise ValueError(f"cannot read the timeline: {error}") from None
    print(json.dumps(_plain(report), indent=1) if chosen.json else report)
    try:
        if chosen.png:
            chosen.png.write_bytes(trace_page.picture(report))
        if chosen.html:
            chosen.html.write_text(trace_page.page(report))
        if chosen.tensorboard:
            trace_page.to_tensorboard(report, chosen.tensorboard)
    except OSError as error:
        raise ValueError(f"the report cannot be written there: {error}") from None
    except ImportError as error:
        raise ValueError(
            f"--png needs matplotlib, and --tensorboard needs tensorboard: pip install them ({error})"
        ) from None
    return 0


def _plain(report: TraceReport) -> dict[str, Any]:
    derived = ("step", "efficiency", "lateness", "imbalance")
    return {
        **dataclasses.asdict(report),
        **{name: getattr(report, name) for name in derived},
        "last": report.last.rank if report.last else None,
        "sentences": report.sentences(),
    }
