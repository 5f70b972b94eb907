"""The C++ tests of the layers that need no torch, ranks as threads. ``make cpp-test`` runs them under sanitizers."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
# A first build takes under two minutes on a slow machine, the tests take seconds.
TIMEOUT_S = 900


def missing_tool() -> str | None:
    """Return which tool the C++ tests lack on this machine, or None."""
    compiler = os.environ.get("CXX", "c++").split()[0]
    return next((tool for tool in ("make", compiler) if shutil.which(tool) is None), None)


def run_tests(*variables: str) -> subprocess.CompletedProcess[str]:
    """Build and run the C++ tests by ``make run`` with the given ``NAME=value`` variables."""
    # A surrounding make's flags (its job server, its variables) are not for this one.
    environment = {k: v for k, v in os.environ.items() if k not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")}
    command = ["make", "--no-print-directory", "-C", str(ROOT / "tests" / "cpp"), "run", *variables]
    return subprocess.run(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


@pytest.fixture(autouse=True)
def tools() -> None:
    """Skip where the tests cannot be built."""
    missing = missing_tool()
    if missing is not None:
        pytest.skip(f"the C++ tests need {missing}, which is not installed")


def test_cpp_tests_pass():
    result = run_tests()
    summary = re.search(r"^(\d+) passed, (\d+) failed$", result.stdout, re.MULTILINE)
    assert summary is not None, result.stdout[-5000:]
    assert (result.returncode, int(summary[2])) == (0, 0), result.stdout[-5000:]
    assert int(summary[1]) >= 30


def test_a_filter_that_matches_nothing_fails():
    result = run_tests("FILTER=no_test_has_this_name")
    assert "0 passed, 0 failed" in result.stdout
    assert result.returncode != 0


def test_unknown_sanitizers_are_refused():
    result = run_tests("SAN=everything")
    assert result.returncode != 0
    assert "use thread, address" in result.stdout
