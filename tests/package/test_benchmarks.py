"""The benchmark programs: short runs give complete reports, and targets are judged correctly."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import math
import os
import re
import runpy
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cpp_make
import pytest
import torch.distributed as dist
from benchmark_runs import BENCHMARKS, check_times, run_benchmark
from probes import HAS_HOOKS
from programs import job, path_with_python, run_file, warm_python
from ranks import run_ranks

from ourddp.bench import report
from ourddp.bench.operations import OPERATIONS, Buffers


def check_png(path: Path) -> None:
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG")
    assert len(content) > 5000


def test_collectives_reports_every_case(tmp_path: Path) -> None:
    files = ("--json", str(tmp_path / "c.json"), "--plot", str(tmp_path / "c.png"), "--ways", "loop,single,written")
    few = ("--ranks", "2", "--min", "1024", "--max", "4096", "--reps", "2", "--calls", "3", "--time-budget", "1")
    output = run_benchmark("collectives.py", "--peers", "ours,gloo,floor,nothing", *few, *files)
    report = json.loads((tmp_path / "c.json").read_text())
    assert report["calls"] == 3
    (run,) = report["runs"]
    assert run["ranks"] == 2
    cases = [(row["collective"], row["size"], row["way"]) for row in run["rows"]]
    names = list(dict.fromkeys(name for name, _, _ in cases))
    assert len(names) == 17
    sizes = {name: [1024, 4096] if name != "barrier" else [0] for name in names}
    ways = ("loop", "single", "written")
    assert cases == [(name, size, way) for name in names for size in sizes[name] for way in ways]
    for row in run["rows"]:
        assert {"ours", "nothing"} <= row["seconds"].keys(), row
        assert ("floor" in row["seconds"]) == (row["collective"] in ("all_reduce", "process_group_all_reduce"))
        check_times(row["seconds"])
    head = (
        r"all_reduce, 2 ranks, single calls\n  size +ours +gloo +floor +nothing +gloo/ours +floor/ours +nothing/ours\n"
    )
    assert re.search(head + r"  1 KiB .* [um]s .*x\n  4 KiB", output)
    # Every report says which machine it comes from.
    assert output.startswith(f"{report['machine']}\n")
    assert re.match(r"\d+-core \w+", report["machine"])
    check_png(tmp_path / "c.png")


@pytest.mark.parametrize(
    ("asked", "size", "seconds", "calls"),
    [(3, 1024, 1e-6, 3), (3, 1 << 20, 1e-6, 3), (3, 1024, 0.15, 1), (None, 1024, 1e-6, 20), (None, 1 << 20, 1e-6, 5)],
)
def test_a_loop_has_as_many_calls_as_asked_for(
    asked: int | None, size: int, seconds: float, calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    program = runpy.run_path(str(BENCHMARKS / "collectives.py"))
    turns: list[int] = []
    ranks = SimpleNamespace(turn_of=lambda _, burst: turns.append(burst), span=lambda _: seconds * max(1, turns[-1]))
    buffers = Buffers.make(0, 1, size)
    peer = SimpleNamespace(buffers=lambda _: buffers, call_of=lambda *_: lambda: None, group=None)
    caller = object.__new__(program["Caller"])
    plan = {"peer": "nothing", "calls": asked, "cases": [("all_reduce", size)]}
    vars(caller).update(_ranks=ranks, _peer=peer, _name="nothing", _plan=plan)
    for act in ("try", "loop", "written", "single"):
        caller.do(program["ACTS"].index(act))
    assert turns == [0, calls, calls, 0]


@pytest.mark.parametrize(("collective", "made"), [("all_reduce", "before mpi"), ("ping_pong", "before before mpi")])
def test_open_mpi_is_called_behind_as_many_calls_as_torch_makes(
    collective: str, made: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    program = runpy.run_path(str(BENCHMARKS / "peers.py"))
    calls: list[str] = []
    peer = object.__new__(program["Joined"])
    vars(peer).update(_name="mpi", group=None, _before=lambda: calls.append("before"))
    operation = replace(OPERATIONS[collective], mpi=lambda *_: lambda: calls.append("mpi"))
    peer.call_of(operation, Buffers.make(0, 2, 8))()
    assert " ".join(calls) == made


def test_messages_are_timed_in_every_way() -> None:
    program = cpp_make.make("messages_path")
    done = subprocess.run([program, "100000", "3"], capture_output=True, text=True, timeout=60, check=True)
    head, row = done.stdout.splitlines()
    assert re.fullmatch(r"size +chosen +cached +around +by hand", head)
    assert re.fullmatch(r"100000 B( +\d+\.\d us){4}", row)


def test_a_program_is_made_anew_if_a_header_has_changed() -> None:
    cpp_make.make("messages_path")
    for header, anew in (("csrc/common/deadline.h", True), ("csrc/backend/lane.h", False)):
        planned = cpp_make.plan("messages_path", f"--what-if={header}")
        assert ("c++ messages.cpp" in planned) == anew


def test_the_readme_shows_the_measured_times() -> None:
    runs = json.loads((BENCHMARKS / "results" / "collectives.json").read_text())["runs"]
    rows = {
        row["size"]: row
        for run in runs
        for row in run["rows"]
        if (run["ranks"], row["collective"], row["way"]) == (4, "all_reduce", "loop")
    }
    readme = (BENCHMARKS.parent / "README.md").read_text()
    shown = re.search(r"<!-- speed -->\n(.*?)<!-- /speed -->", readme, re.DOTALL)
    assert shown is not None
    table = [[cell.strip() for cell in line.split("|")[1:-1]] for line in shown[1].splitlines()[2:]]
    assert len(table) == 5
    for size, *times in table:
        row = rows[report.parse_size(size)]
        assert times == [report.show_seconds(report.median(row, peer)) for peer in ("ours", "gloo", "openmpi")]
    for picture in re.findall(r"\]\((\S+\.png)\)", readme):
        assert (BENCHMARKS.parent / picture).is_file()


def test_collectives_includes_mpi_if_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mpi4py")
    if not Path(sys.executable).with_name("mpirun").exists():
        pytest.skip("there is no mpirun beside this Python")
    monkeypatch.setenv("PATH", path_with_python())
    flags = ("--ranks", "2", "--collectives", "all_reduce,gather,ping_pong", "--sizes", "4K", "--reps", "2")
    names = ["ours", "gloo", "openmpi", "openmpi_c10d"]
    run_benchmark("collectives.py", "--peers", ",".join(names), *flags, "--json", str(tmp_path / "c.json"))
    (run,) = json.loads((tmp_path / "c.json").read_text())["runs"]
    for row in run["rows"]:
        assert list(row["seconds"]) == names
        check_times(row["seconds"])


def test_sharded_compares_the_backends_with_each_model(tmp_path: Path) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    flags = ("--steps=1", "--rounds=2", "--width=16", "--layers=1", f"--json={tmp_path / 's.json'}")
    ends = run_file(BENCHMARKS / "sharded.py", *flags, each=job(2, store))
    assert [code for code, _ in ends] == [0, 0], ends
    for model in ("dtensor", "by_hand", "fsdp"):
        assert re.search(rf"^{model}( +[\d.]+){{3}}( +[\d.]+x){{2}}$", ends[0][1], re.MULTILINE), ends
    report = json.loads((tmp_path / "s.json").read_text())
    assert report["ranks"] == 2
    for times in report["seconds"].values():
        assert all(times[backend] > 0 for backend in ("ours", "gloo", "nothing"))


def report_of(seconds: dict[int, dict[str, float]], ranks: int) -> dict[str, Any]:
    rows = [
        {
            "collective": name,
            "way": way,
            "size": size,
            "seconds": {peer: {"median": time} for peer, time in row.items()},
        }
        for name in ("all_reduce", "process_group_all_reduce")
        for way in ("loop", "single")
        for size, row in seconds.items()
    ]
    return {
        "machine": "m",
        "torch": "t",
        "runs": [{"ranks": ranks, "peers": ["ours", "gloo", "openmpi"], "rows": rows}],
    }


@pytest.mark.parametrize(
    ("ours", "verdict"),
    [
        ({"ours": 10e-6, "gloo": 250e-6, "openmpi": 6e-6}, ["PASS", "PASS"]),
        ({"ours": 20e-6, "gloo": 150e-6, "openmpi": 13e-6}, ["FAIL", "PASS"]),
        ({"ours": 10e-6, "gloo": 250e-6, "openmpi": 1e-6}, ["PASS", "FAIL"]),
        ({"ours": 10e-6, "openmpi": 6e-6}, ["SKIP", "PASS"]),
    ],
)
def test_targets_are_judged_by_their_numbers(
    ours: dict[str, float], verdict: list[str], tmp_path: Path, ended: Any
) -> None:
    (tmp_path / "r.json").write_text(json.dumps(report_of({4: ours}, ranks=4)))
    status, output, _ = ended("collectives.py", "--check", "--load", str(tmp_path / "r.json"))
    assert status == int("FAIL" in verdict)
    for way in ("loop", "single"):
        lines = [line for line in output.splitlines() if re.match(rf"[A-Z]{{4}}  \w+, 4 ranks, +4 B, {way}:", line)]
        assert [line.split()[0] for line in lines] == verdict


@pytest.mark.parametrize(
    ("first", "its_time", "called", "gloo", "summary", "ratio"),
    [
        ("openmpi", 9.6e-6, 9.6e-6, 250e-6, "in 4 of 4 cases", ""),
        ("openmpi", 8e-6, None, 250e-6, "in 0 of 4 cases\nthe others:", "-"),
        ("openmpi", 8e-6, 9e-6, 250e-6, "in 0 of 4 cases\nthe others; in 0 it would be", "1.11x"),
        ("openmpi", 8e-6, 20e-6, 250e-6, "in 0 of 4 cases\nthe others; in 4 it would be", "0.50x"),
        ("openmpi", 8e-6, 20e-6, 9e-6, "in 0 of 4 cases\nthe others; in 0 it would be", "0.50x"),
        ("impi", 8e-6, 20e-6, 250e-6, "in 0 of 4 cases\nthe others:", "-"),
    ],
)
def test_collectives_lists_where_a_rival_is_ahead(
    first: str, its_time: float, called: float | None, gloo: float, summary: str, ratio: str, tmp_path: Path, ended: Any
) -> None:
    others = {"gloo": gloo, "floor": 1e-6, "nothing": 1e-6, **({"openmpi_c10d": called} if called else {})}
    seconds = {4096: {"ours": 10e-6, first: its_time, **others}}
    (tmp_path / "r.json").write_text(json.dumps(report_of(seconds, ranks=4)))
    _, output, _ = ended("collectives.py", "--load", str(tmp_path / "r.json"))
    assert f"\nours is first, or within 5% of the first, {summary}" in output
    times = rf"10.0 us +{first} +8.0 us +1.25x"
    behind = re.findall(rf"^  all_reduce +4 +(\w+) +4 KiB +{times} +(\S+)$", output, re.MULTILINE)
    assert behind == ([("loop", ratio), ("single", ratio)] if ratio else [])


def test_collectives_says_what_a_peer_lacks(ended: Any) -> None:
    status, _, _ = ended("collectives.py", "--peers", "impi")
    assert re.match("impi cannot take part: .*pip install", status)


class Turns:
    """Jobs whose turns take the seconds that `takes` says, and are noted."""

    def __init__(self, jobs: type, acts: int, takes: dict[str, float]) -> None:
        self.plans, self.acts, self.takes = takes, acts, takes
        self.noted: list[str] = []
        self._measure = jobs.measure

    def turn(self, name: str, asked: int = 0) -> float:
        self.noted.append(name)
        return self.takes[name] if asked % self.acts else math.nan  # 0 is "leave"

    def warm_up(self, names: list[str], asked: int) -> dict[str, float]:
        return {name: self.takes[name] for name in names}

    def measure(self, rounds: dict[str, int], asked: int = 0) -> dict[str, list[float]]:
        self.noted.clear()
        return self._measure(self, rounds, asked)


def test_peers_of_collectives_share_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    program = runpy.run_path(str(BENCHMARKS / "collectives.py"))
    jobs = Turns(program["turns"].Jobs, len(program["ACTS"]), {"ours": 0.125, "gloo": 0.5, "mpich": 9.0})
    arguments = argparse.Namespace(ways="single", time_budget=32, reps=300)
    rows, left_out = program["measure"](jobs, 2, [("all_reduce", 4096), ("all_reduce", 8192)], arguments)
    assert [list(row["seconds"]) for row in rows] == [["ours", "gloo"]] * 2  # mpich is not tried again
    assert left_out == ["without mpich from all_reduce of 4 KiB on: a call took 9.0 s"]
    assert [row["rounds"] for row in rows] == [64, 64]
    assert jobs.noted.count("gloo") == 16
    halves = jobs.noted[:40], jobs.noted[40:]
    assert [half.count("gloo") for half in halves] == [8, 8]


def test_ddp_reports_the_requested_variants(tmp_path: Path) -> None:
    variants = ["ourddp+auto", "local", "torch+gloo", "ourddp+views"]
    files = ("--json", str(tmp_path / "d.json"), "--plot", str(tmp_path / "d.png"))
    flags = ("--ranks", "2", "--reducer-overhead", "--reps", "2", "--time-budget", "1", *files)
    output = run_benchmark("ddp.py", "--variants", ",".join(variants), *flags)
    (run,) = json.loads((tmp_path / "d.json").read_text())["runs"]
    (row,) = run["rows"]
    assert list(row["seconds"]) == variants
    assert (row["parameters"], row["bytes"]) == (1000, 1024000)
    check_times(row["seconds"])
    assert "per parameter" in output
    check_png(tmp_path / "d.png")
    assert row["chosen_bucket_bytes"]["ourddp+auto"] >= 64 << 10  # chosen before anything is timed
    assert re.search(r"^ +ourddp\+views +\d.*\nourddp\+auto chose buckets of \d+ [KM]iB$", output, re.MULTILINE), output


@pytest.mark.skipif(not HAS_HOOKS, reason="the package has symmetric memory from torch 2.15 on")
def test_symmetric_memory_reports_each_way_and_size() -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ends = run_file(BENCHMARKS / "symmetric_memory.py", "--rounds=2", each=job(2, store))
    assert [code for code, _ in ends] == [0, 0], ends
    times = re.findall(r"^\| \d+ B \| ([\d.]+) us \| ([\d.]+) us \| ([\d.]+) us \|$", ends[0][1], re.MULTILINE)
    assert len(times) == 4
    assert all(float(time) > 0 for row in times for time in row)


def test_inference_reports_the_time_of_a_token(tmp_path: Path) -> None:
    few = ("--ranks", "2", "--layers", "1", "--no-compile", "--rounds", "2", "--time-budget", "1")
    files = ("--json", str(tmp_path / "i.json"))
    output = run_benchmark("inference.py", *few, "--variants", "alone,ours", *files)  # which compares the tokens
    (row,) = json.loads((tmp_path / "i.json").read_text())["rows"]
    assert (row["ranks"], row["rounds"], list(row["seconds"])) == (2, 2, ["alone", "ours"])
    check_times(row["seconds"])
    assert "tokens a second" in output


def measure_stragglers(rank: int, world: int) -> tuple[int, str]:
    sys.argv = ["stragglers.py", "--trials", "1"]
    with contextlib.redirect_stdout(io.StringIO()) as output:
        status = runpy.run_path(str(BENCHMARKS / "stragglers.py"))["main"]()
    return status, output.getvalue()


def test_stragglers_reports_both_kinds_of_steps() -> None:
    (status, output), (other, nothing) = run_ranks(2, measure_stragglers, backend=None)
    assert (other, nothing) == (status, "")
    named = re.findall(r"^(\w+): named by all ranks in ([01]) of 1 trials$", output, re.MULTILINE)
    assert [way for way, _ in named] == ["sync", "overlap"]
    assert (status == 0) == all(count == "1" for _, count in named)
    ratio = r"^  saving predicted / measured: (-?\d+\.\d{3}) over all trials; off by \d+\.\d% \(median\), by at most"
    assert len(re.findall(ratio, output, re.MULTILINE)) == 2


def test_ddp_compares_both_reducers_over_both_backends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    program = runpy.run_path(str(BENCHMARKS / "ddp.py"))
    monkeypatch.setattr(sys, "argv", ["ddp.py"])
    variants = program["parse_arguments"]().variants.split(",")
    assert variants == ["local", "torch+gloo", "torch+ours", "ourddp+ours"]
    assert [program["VARIANTS"][name][:2] for name in variants[1:]] == [
        ("torch", "gloo"),
        ("torch", "ours"),
        ("ours", "ours"),
    ]


def test_a_failing_rank_ends_the_benchmark(tmp_path: Path) -> None:
    script = tmp_path / "fails.py"
    script.write_text(
        "import sys, time\n"
        "from ourddp.bench import harness\n"
        "import scaffold\n"
        "if scaffold.is_rank():\n"
        "    with harness.StartedRanks() as ranks:\n"
        "        if ranks.rank == 1:\n"
        "            sys.exit('rank 1 gives up')\n"
        "        ranks.together()\n"
        "harness.run_ranks([__file__], None, 2, timeout=60)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(BENCHMARKS)}
    result = subprocess.run(
        [warm_python(), str(script)], env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert result.returncode == 1
    assert "rank 1 gives up" in result.stderr
    assert "RuntimeError: a rank of the benchmark ended with status 1" in result.stderr


def test_sizes_are_parsed_as_they_are_printed() -> None:
    read = {"4": 4, "64K": 64 << 10, "25m": 25 << 20, "1 GiB": 1 << 30, "7 B": 7}
    assert {text: report.parse_size(text) for text in read} == read
    for size in (4, 1000, 1024, 25 << 20, 1 << 30):
        assert report.parse_size(report.show_size(size)) == size
    with pytest.raises(ValueError, match="is not a size"):
        report.parse_size("4X")
