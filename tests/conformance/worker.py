"""Run tests of the suite at one world size, a JSON line for each; run.py starts one such process per world size."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import time
import traceback
import unittest
from pathlib import Path
from typing import Any, TextIO

from conformance.suite import load, make_test_classes


class _Collect(unittest.TestResult):
    """Keeps the outcome of the test that ran last."""

    def __init__(self) -> None:
        super().__init__()
        self.outcome = "pass"
        self.detail = ""

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:
        super().addSkip(test, reason)
        self.outcome, self.detail = "skip", reason

    def _failed(self, err: Any) -> None:
        text = str(err[1])
        self.outcome = "timeout" if "terminated or timed out" in text else "fail"
        self.detail = text if err[0] is RuntimeError else "".join(traceback.format_exception(*err))

    def addError(self, test: unittest.TestCase, err: Any) -> None:
        self._failed(err)

    def addFailure(self, test: unittest.TestCase, err: Any) -> None:
        self._failed(err)

    def addUnexpectedSuccess(self, test: unittest.TestCase) -> None:
        self.outcome, self.detail = "fail", "unexpected success"


def run_tests(test_classes: dict[str, type], names: list[str], log_path: Path, report: TextIO) -> None:
    """Run ``names`` one after another; every test writes a line when it starts and one with its outcome."""
    for name in names:
        print(json.dumps({"start": name}), file=report, flush=True)
        log_path.write_text("")
        result = _Collect()
        began = time.monotonic()
        unittest.TestSuite([test_classes[name](name)]).run(result)
        seconds = round(time.monotonic() - began, 2)
        line = {"test": name, "outcome": result.outcome, "seconds": seconds, "detail": result.detail}
        if result.outcome not in ("pass", "skip"):
            line["log"] = log_path.read_text(errors="replace")[-20000:]
        print(json.dumps(line), file=report, flush=True)


def main() -> None:
    """Entry point; the tests' names come on standard input, none means all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--world-size", type=int, required=True)
    parser.add_argument("--backend", required=True)
    parser.add_argument("--ddp", required=True)
    parser.add_argument("--timeout", type=int, required=True)
    parser.add_argument("--log", type=Path, required=True)
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--pattern", default="")
    options = parser.parse_args()

    # The report keeps the real standard output; whatever else prints goes to standard error.
    report = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    wanted = sys.stdin.read().split()
    suite = load(options.world_size, options.timeout, options.backend, options.ddp)
    loader = unittest.TestLoader()
    size, nodes = options.world_size, options.nodes
    node_of_rank = [f"node {rank * nodes // size}" for rank in range(size)] if nodes > 1 else []
    classes = make_test_classes(suite, options.log, node_of_rank)
    by_name = {name: case for case in classes for name in loader.getTestCaseNames(case)}
    names = [name for name in wanted or by_name if re.search(options.pattern, name)]
    print(json.dumps({"tests": names}), file=report, flush=True)
    run_tests(by_name, names, options.log, report)


if __name__ == "__main__":
    main()
