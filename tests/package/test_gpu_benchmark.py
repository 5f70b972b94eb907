"""benchmarks/gpu.py: a try on the CPU gives a complete report, and targets are judged correctly."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmark_runs import BENCHMARKS, check_times, run_benchmark


def test_gpu_refuses_to_check_other_numbers_of_ranks(ended: Any) -> None:
    status, _, errors = ended("gpu.py", "--check", "--ranks", "2")
    assert status == 2
    assert "--check is for 4 ranks" in errors


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_gpu_needs_a_gpu(ended: Any) -> None:
    status, output, errors = ended("gpu.py")
    assert (status, output) == (2, "")
    assert "finds no GPU" in errors


def test_gpu_runs_on_the_cpu_for_a_try(tmp_path: Path) -> None:
    sizes = ("--sizes", "64K", "--layers", "1", "--width", "64", "--time-budget", "1")
    output = run_benchmark("gpu.py", "--device", "cpu", "--ranks", "2", *sizes, "--json", str(tmp_path / "g.json"))
    report = json.loads((tmp_path / "g.json").read_text())
    (row,) = report["all_reduce"]["rows"]
    assert row["size"] == 64 << 10
    assert row["floor"] == 4 * row["size"] / report["all_reduce"]["copied_bytes_per_second"]
    assert set(row["seconds"]) == {"ours", "gloo"}
    check_times(row["seconds"])
    assert set(report["ddp"]["seconds"]) == {"local", "ourddp+ours", "ourddp+ours+auto", "torch+gloo"}
    assert all(apart < 1e-3 for apart in report["ddp"]["apart"].values())
    assert re.search(r"without NCCL: .*GPU", output)


def test_gpu_judges_its_targets(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    program = runpy.run_path(str(BENCHMARKS / "gpu.py"))

    def report(slower: float) -> dict[str, Any]:
        def row(**seconds: float) -> dict[str, Any]:
            return {"seconds": {name.replace("_", " "): {"median": value} for name, value in seconds.items()}}

        return {
            "all_reduce": {
                "rows": [
                    {"size": 1 << 20, "floor": 1.0, **row(ours=9.0)},
                    {"size": 100 << 20, "floor": 1.0, **row(ours=10.0 * slower, gloo=220.0)},
                ]
            },
            "ddp": {
                "seconds": {"ourddp+ours": {"median": slower}, "torch+gloo": {"median": 2.5}},
                "apart": {"ourddp+ours": 0.01 * slower, "torch+gloo": 0.9},
            },
        }

    def judged(slower: float) -> tuple[bool, list[str]]:
        met = program["check"](report(slower))
        return met, [line.split()[0] for line in capsys.readouterr().out.splitlines() if line]

    assert judged(1.0) == (True, ["met"] * 4)
    # The all-reduce, and Gloo's lead over it; the step, but not its difference.
    assert judged(1.7) == (False, ["MISSED"] * 3 + ["met"])
    assert not program["check"]({})
    assert "not measured" in capsys.readouterr().out
