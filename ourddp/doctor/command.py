"""The command ``doctor``: its arguments, its table and its exit status."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import textwrap
from collections import Counter
from collections.abc import Sequence

from ourddp import joining, processes
from ourddp.doctor.checks import Finding, examine
from ourddp.doctor.meeting import Job, NoMeetingError, meet, open_store
from ourddp.doctor.words import OK, PROBLEM, WARNING, count

HELP = "look for what would stop or slow down a job, on this machine or on all of an allocation"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``python -m ourddp doctor``."""
    parser.add_argument(
        "--ranks",
        type=int,
        metavar="N",
        help=f"without a launcher: start N ranks here (default: one for each core, 2 to {processes.MOST_STARTED})",
    )
    parser.add_argument(
        "--timeout",
        type=float,
        default=60.0,
        metavar="SECONDS",
        help="how long to wait for ranks to come (default: %(default)s)",
    )
    parser.add_argument("--json", action="store_true", help="print the findings, and the facts of all ranks, as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Examine the job that this process was started in, or this machine; return the exit status, 1 for a problem.

    Raises ValueError on ranks that do not reach rank 0.
    """
    place = joining.find(os.environ)
    if arguments.timeout <= 0 or (arguments.ranks is not None and arguments.ranks < 1):
        raise ValueError("--timeout must be greater than 0, and --ranks at least 1")
    if place.launcher == "none":
        return _start(arguments)
    if arguments.ranks is not None:
        joining.require_no_launcher(place)
    try:
        job = meet(open_store(place, arguments.timeout), place, arguments.timeout)
    except NoMeetingError as error:
        raise ValueError(str(error)) from error
    if job is None:
        return 0
    findings = examine(job)
    print(json.dumps(as_json(job, findings), indent=1) if arguments.json else render(findings, _width()))
    return 1 if any(each.state == PROBLEM for each in findings) else 0


def _start(arguments: argparse.Namespace) -> int:
    """Run the command in ranks of this machine."""
    ranks = arguments.ranks or processes.default_ranks()
    command = [sys.executable, "-m", "ourddp", "doctor", "--timeout", str(arguments.timeout)]
    return processes.run_ranks(command + (["--json"] if arguments.json else []), ranks)


def _width() -> int | None:
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def render(findings: Sequence[Finding], width: int | None = None) -> str:
    """Return a line for each finding, wrapped to ``width`` characters if it is given, and a last one that counts."""
    states = max(len(state) for state in (OK, WARNING, PROBLEM))
    names = max((len(each.check) for each in findings), default=0)
    lines = []
    for each in findings:
        line = f"{each.state:<{states}}  {each.check:<{names}}  {each.text}"
        indent = " " * (states + names + 4)
        lines += textwrap.wrap(line, width, subsequent_indent=indent) if width and width > 2 * len(indent) else [line]
    counts = Counter(each.state for each in findings)
    found = [count(counts[state], state) for state in (PROBLEM, WARNING) if counts[state]]
    return "\n".join([*lines, ", ".join(found) or "no problem found"])


def as_json(job: Job, findings: Sequence[Finding]) -> dict[str, object]:
    """Return the findings, and the facts of all ranks."""
    return {
        "ranks": job.size,
        "hosts": [[each.rank for each in host] for host in job.hosts()],
        "findings": [vars(each) for each in findings],
        "facts": [job.facts[rank].to_json() for rank in sorted(job.facts)],
    }
