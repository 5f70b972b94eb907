"""Runs the benchmark programs, and checks what they report."""

from __future__ import annotations

import subprocess
from pathlib import Path

from programs import warm_python

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
TIMEOUT = 120


def run_benchmark(name: str, *flags: str) -> str:
    """Return what the benchmark prints on stdout; fail if it fails."""
    command = [warm_python(), str(BENCHMARKS / name), *flags]
    result = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def check_times(seconds: dict[str, dict[str, float]]) -> None:
    for times in seconds.values():
        assert 0 < times["low"] <= times["median"] <= times["high"]
