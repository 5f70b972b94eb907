"""The benchmark of recovery: its trials in place, of which a few are made here."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from programs import run_file
from torch.distributed import distributed_c10d as c10d

BENCHMARK = Path(__file__).resolve().parents[2] / "benchmarks" / "recovery.py"


@pytest.mark.parametrize("flags", [(), ("--nodes", "2", "--unordered")])
def test_the_benchmark_kills_ranks_and_replaces_them(flags: tuple[str, ...]) -> None:
    [(status, output)] = run_file(BENCHMARK, "--trials", "3", "--restarts", "0", "--ranks", "3", *flags)
    if not hasattr(c10d, "_reconfigure"):
        assert (status, output) == (0, "in place: torch has reconfigure() from 2.15 on\n")
        return
    assert status in (0, 1), output  # 1: a busy machine was slow
    for name, limit in (("those left go on", 1), ("a replacement joins", 2)):
        assert re.search(rf"^  {name} +median +[\d.]+ s .* [0-3] of 3 within {limit} s$", output, re.MULTILINE), output
