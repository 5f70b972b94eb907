"""benchmarks/between_hosts.py: a short run gives a complete report, and targets are judged correctly."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path
from typing import Any

import pytest
from benchmark_runs import BENCHMARKS, check_times, run_benchmark
from hosts import why_no_hosts


def test_between_hosts_reports_times_and_bytes(tmp_path: Path) -> None:
    reason = why_no_hosts()
    if reason:
        pytest.skip(reason)
    path = tmp_path / "h.json"
    flags = ("--variants", "ours,by two links,bfloat16,gloo", "--local", "1", "--sizes", "1M", "--time-budget", "1")
    output = run_benchmark("between_hosts.py", *flags, "--json", str(path))
    (row,) = json.loads(path.read_text())["rows"]
    assert list(row["seconds"]) == ["ours", "by two links", "bfloat16", "gloo"]
    check_times(row["seconds"])
    # After a pause the link lets 256 KiB pass at once.
    assert row["seconds"]["ours"]["median"] > 0.7 * (1 << 20) / 125e6, "faster than the link"
    assert row["sent"]["ours"] == [pytest.approx(1 << 20, rel=0.03)] * 2
    assert row["sent"]["by two links"] == [pytest.approx(1 << 20, rel=0.03)] * 2
    assert row["sent"]["bfloat16"] == [pytest.approx(1 << 19, rel=0.03)] * 2
    assert re.search(r"2 hosts of 1 ranks, (cubic|reno), links of 1000 Mbit/s", output)
    assert re.search(r"\n +ours +\d.* ms +\d.*% +100.\d+% +\d", output)


def test_between_hosts_judges_its_targets(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    program = runpy.run_path(str(BENCHMARKS / "between_hosts.py"))

    def rows(ours: float) -> list[dict[str, Any]]:
        def row(hosts: int, mbit: int, size: int) -> dict[str, Any]:
            least = 2 * (hosts - 1) / hosts * size
            wire = least / (mbit * 125e3) if mbit else 1e-3
            seconds = {"ours": ours * wire, "bfloat16": wire / 2, "gloo": 3 * wire}
            times = {name: {"median": value} for name, value in seconds.items()}
            return {"hosts": hosts, "mbit": mbit, "size": size, "seconds": times, "sent": {"ours": [least * ours]}}

        return [row(2, 1000, 25 << 20), row(4, 1000, 25 << 20), row(2, 0, 25 << 20), row(2, 0, 64 << 10)]

    assert program["check"](rows(1.0))
    assert "MISSED" not in capsys.readouterr().out
    assert not program["check"](rows(1.2))
    missed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("MISSED")]
    assert len(missed) == 6  # both shares of the line rate, 2.5 times Gloo's speed instead of 3, and three rows' bytes
