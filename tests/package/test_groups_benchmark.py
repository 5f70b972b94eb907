"""benchmarks/many_groups.py, which says what a group costs."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from programs import warm_python

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def test_groups_are_made_with_each_backend(tmp_path):
    command = [warm_python(), str(BENCHMARKS / "many_groups.py"), "--ranks", "3", "--groups", "4"]
    command += ["--json", str(tmp_path / "g.json")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr
    assert "4 groups of 3 ranks" in result.stdout
    ours, gloo = json.loads((tmp_path / "g.json").read_text())["rows"]
    assert (ours["backend"], gloo["backend"]) == ("ours", "gloo")
    for row in (ours, gloo):
        assert row["init_seconds"] > 0
        assert row["group_seconds"] > 0
        assert row["bytes"] > 0
    # Each of Gloo's groups has connections and threads of its own.
    assert gloo["descriptors"] >= 4 * 2
    assert ours["descriptors"] < gloo["descriptors"]
    assert ours["threads"] < gloo["threads"]
