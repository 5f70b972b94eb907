"""The C++ tests of the layers without torch, with ranks as threads. ``make cpp-test`` runs them under sanitizers."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# On two cores a first build takes two to three minutes, and the tests one.
TIMEOUT_S = 900
pytestmark = pytest.mark.timeout(TIMEOUT_S + 60)


def missing_tool() -> str | None:
    """Return the tool that the C++ tests lack on this machine, or None."""
    compiler = os.environ.get("CXX", "c++").split()[0]
    return next((tool for tool in ("make", compiler) if shutil.which(tool) is None), None)


def run_tests(*variables: str) -> subprocess.CompletedProcess[str]:
    """Build and run the C++ tests by ``make run`` with the given ``NAME=value`` variables."""
    # The flags and variables of a surrounding make, such as its job server, are not for this one.
    environment = {k: v for k, v in os.environ.items() if k not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")}
    jobs = f"-j{len(os.sched_getaffinity(0))}"
    command = ["make", "--no-print-directory", jobs, "-C", str(ROOT), "-f", "tests/cpp/Makefile", "run", *variables]
    return subprocess.run(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


def failures_of(output: str) -> str:
    """Return the reports of the C++ tests that failed, and then the end of the output, which shows a crash."""
    failed = re.findall(r"^FAILED .*\n(?:(?!ok     |FAILED |\d+ passed, ).*\n)*", output, re.MULTILINE)
    return "".join(failed) + "--- the output ends with\n" + output[-3000:]


@pytest.fixture(autouse=True)
def tools() -> None:
    """Skip the tests if the C++ tests cannot be built."""
    missing = missing_tool()
    if missing is not None:
        pytest.skip(f"the C++ tests need {missing}, which is not installed")


def test_cpp_tests_pass():
    result = run_tests()
    # The last summary counts, since some tests run a part of the program in another process.
    summaries = re.findall(r"^(\d+) passed, (\d+) failed$", result.stdout, re.MULTILINE)
    assert summaries, failures_of(result.stdout)
    passed, failed = (int(count) for count in summaries[-1])
    assert (result.returncode, failed) == (0, 0), failures_of(result.stdout)
    assert passed >= 30


def test_the_report_of_failures_begins_with_them():
    noise = "".join(f"ok     test_{i} (0.00 s)\n" for i in range(1000))
    first = "FAILED one (0.10 s)\n  a.cpp:1: not true: x\nsecond line\n"
    last = "FAILED other (0.20 s)\n  b.cpp:2: 1 == 2\n"
    shown = failures_of(f"{noise}{first}{noise}{last}{noise}1000 passed, 2 failed\n")
    assert shown.startswith(first + last + "---")
    assert shown.endswith("1000 passed, 2 failed\n")
    assert "test_999" in failures_of(noise)  # the last test before the program died


def test_a_filter_that_matches_nothing_fails():
    result = run_tests("FILTER=no_test_has_this_name")
    assert "0 passed, 0 failed" in result.stdout
    assert result.returncode != 0


def test_unknown_sanitizers_are_refused():
    result = run_tests("SAN=everything")
    assert result.returncode != 0
    assert "use thread, address" in result.stdout
