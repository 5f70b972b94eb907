"""A fixture for the tests of benchmark programs."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable

import pytest
from benchmark_runs import BENCHMARKS


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """``ended(name, *flags)`` runs a benchmark in this process; returns its status, its output and its errors."""

    def run(name: str, *flags: str) -> tuple[int, str, str]:
        monkeypatch.syspath_prepend(str(BENCHMARKS))
        monkeypatch.setattr(sys, "argv", [name, *flags])
        with pytest.raises(SystemExit) as end:
            runpy.run_path(str(BENCHMARKS / name), run_name="__main__")
        return end.value.code, *capsys.readouterr()

    return run
