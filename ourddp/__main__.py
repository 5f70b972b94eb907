"""Command-line tools: ``python -m ourddp info``, ``options``, ``select`` and ``tune``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from ourddp import _C, info, tune


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return the exit status: 0, or 1 with a sentence on stderr if it cannot be done."""
    parser = argparse.ArgumentParser(prog="python -m ourddp", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("info", help="how ourddp was built, what this node offers, which backends torch has")
    options = commands.add_parser("options", help="the environment variables and the values in force")
    options.add_argument("--markdown", action="store_true", help="print the table that README.md shows")
    commands.add_parser("select", help="the table of algorithms in force between nodes; OURS_SELECT changes it")
    tune.add_arguments(commands.add_parser("tune", help="measure the algorithms between nodes, and write such a table"))
    chosen = parser.parse_args(arguments)
    try:
        if chosen.command == "tune":
            return tune.run(chosen)
        print(_output(chosen))
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def _output(chosen: argparse.Namespace) -> str:
    if chosen.command == "info":
        return info.render(info.collect())
    if chosen.command == "select":
        return _C.selection_table(_C.option_values()["OURS_SELECT"]).rstrip()
    if chosen.markdown:
        return info.options_markdown()
    return "\n".join(f"{name}={value}" for name, value in _C.option_values().items())


if __name__ == "__main__":
    sys.exit(main())
