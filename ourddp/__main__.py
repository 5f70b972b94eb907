"""The command line, ``python -m ourddp`` or ``ourddp``: looks, measures and starts ranks. See docs/commands.md."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import torch

import ourddp
from ourddp import _C, info, interrupts, launching, trace_report, tune
from ourddp.bench import command as bench
from ourddp.doctor import command as doctor

PROGRAMS = {"bench": bench, "doctor": doctor, "launch": launching, "report": trace_report, "tune": tune}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return the exit status: 0, or 1 with a sentence on stderr if it cannot be done."""
    chosen = _parser().parse_args(arguments)
    try:
        if chosen.command in PROGRAMS:
            return PROGRAMS[chosen.command].run(chosen)
        print(_output(chosen))
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m ourddp", description="The tools of ourddp.")
    parser.add_argument(
        "--version", action="version", version=f"ourddp {ourddp.__version__}, torch {torch.__version__}"
    )
    commands = parser.add_subparsers(dest="command", required=True)
    shows = {
        "info": "how ourddp was built, what this node offers, which backends torch has",
        "options": "the environment variables and the values in force",
        "select": "the table of algorithms in force within and between nodes; OURS_SELECT changes it",
    }
    for name, text in shows.items():
        command = commands.add_parser(name, help=text)
        form = command.add_mutually_exclusive_group()
        form.add_argument("--json", action="store_true", help="print JSON")
        if name == "options":
            form.add_argument("--markdown", action="store_true", help="print the page docs/options.md")
    commands.add_parser(
        "cmake-prefix", help="what CMAKE_PREFIX_PATH needs for find_package(ourddp) of a program in C++"
    )
    for name, program in PROGRAMS.items():
        program.add_arguments(commands.add_parser(name, help=program.HELP))
    return parser


def _output(chosen: argparse.Namespace) -> str:
    if chosen.command == "cmake-prefix":
        return ";".join(str(Path(package.__file__).resolve().parent) for package in (ourddp, torch))
    if chosen.command == "info":
        report = info.collect()
        return json.dumps(report, indent=1) if chosen.json else info.render(report)
    if chosen.command == "select":
        table = _C.selection_table(_C.option_values()["OURS_SELECT"]).rstrip()
        return json.dumps(info.selection(table), indent=1) if chosen.json else table
    values = _C.option_values()
    if chosen.json:
        return json.dumps([{**row, "value": values[row["name"]]} for row in _C.option_table()], indent=1)
    if chosen.markdown:
        return info.options_markdown()
    return "\n".join(f"{name}={value}" for name, value in values.items())


def program() -> NoReturn:
    """Run the command line as a program of its own, which the console script ``ourddp`` calls."""
    interrupts.in_one_line()
    sys.exit(main())


if __name__ == "__main__":
    program()
