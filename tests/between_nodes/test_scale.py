"""The models of benchmarks/scale.py and many_ranks.py: they count what theory says, and are judged by measurements."""

from __future__ import annotations

import importlib
import json
import re
import subprocess
from pathlib import Path
from types import ModuleType

import cpp_make
import pytest
from programs import warm_python

from ourddp import _C

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
SIZE = 25 << 20


@pytest.fixture
def scale(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("scale")


def machine(scale: ModuleType, **changes: float) -> object:
    """A cluster of which only the links cost time."""
    facts = {"local_ranks": 4, "latency": 0.0, "overhead": 0.0, "bandwidth": 1e9, "sync": 0.0, "memory": 1e30}
    return scale.Machine(**{**facts, **changes})


@pytest.mark.parametrize("nodes", [2, 3, 16, 500])
def test_bytes_on_a_link(scale, nodes):
    ranks = 4 * nodes
    least = 2 * (nodes - 1) / nodes * SIZE / 1e9
    assert scale.hierarchical_ring(machine(scale), nodes, SIZE) == pytest.approx(least)
    assert scale.hierarchical_direct(machine(scale), nodes, SIZE) == pytest.approx(least)
    assert scale.flat_ring(machine(scale), nodes, SIZE) == pytest.approx(2 * (ranks - 1) / ranks * SIZE / 1e9)
    assert scale.parameter_server(machine(scale), nodes, SIZE) == pytest.approx(2 * (ranks - 4) * SIZE / 1e9)


def test_steps_of_short_messages(scale):
    cluster = machine(scale, latency=1.0, bandwidth=1e30)
    assert scale.flat_ring(cluster, 8, 4) == pytest.approx(2 * 31)
    assert scale.hierarchical_ring(cluster, 8, 4) == pytest.approx(2 * 7)
    assert scale.hierarchical_direct(cluster, 8, 4) == pytest.approx(2)
    assert scale.hierarchical_doubling(cluster, 8, 4) == pytest.approx(3)
    assert scale.hierarchical_whole(cluster, 8, 4) == pytest.approx(1)


def test_messages_of_chunks(scale):
    cluster = machine(scale, overhead=1.0, bandwidth=1e30)
    assert scale.hierarchical_direct(cluster, 9, 25 << 20) == pytest.approx(50 * 2 * 8)
    assert scale.hierarchical_ring(cluster, 9, 25 << 20) == pytest.approx(44 * 2 * 8)  # of 9 x 4 parts of 16 KiB
    assert scale.hierarchical_ring(cluster, 256, 25 << 20) == pytest.approx(2 * 255)
    # Parts of 8 KiB and no less, so 4 chunks and not 50, and fewer rails than ranks.
    many = machine(scale, overhead=1.0, bandwidth=1e30, local_ranks=64)
    assert scale.hierarchical_direct(many, 32, 25 << 20) == pytest.approx(4 * 2 * 31)
    assert scale.hierarchical_whole(cluster, 9, 4) == pytest.approx(8)


def test_the_built_in_table_is_not_far_from_the_best_of_the_model(scale):
    cluster = scale.Machine(8, 2e-5, 2e-6, 10e9 / 8, 5e-6, 4e10)  # the program's defaults
    between = {name: model for name, model in scale.ALGORITHMS.items() if name.startswith("hierarchical ")}
    for nodes in (*range(2, 40), 48, 64, 100, 127, 128, 200, 255, 256, 300, 400, 449):
        for exponent in range(8, 29):
            times = {name.split()[1]: model(cluster, nodes, 1 << exponent) for name, model in between.items()}
            chosen = _C.choose_algorithm("all_reduce", nodes, 8, 1 << exponent)
            assert times[chosen] <= 1.6 * min(times.values()), (nodes, 1 << exponent, chosen, times)


def test_one_node_needs_no_link(scale):
    cluster = machine(scale, latency=1e9, bandwidth=1e-9, memory=4.0)
    for model in (
        scale.hierarchical_ring,
        scale.hierarchical_direct,
        scale.hierarchical_doubling,
        scale.hierarchical_whole,
    ):
        assert model(cluster, 1, 10) == pytest.approx(2 * 4 * 10 / 4.0)


def test_crossings(scale):
    cluster = machine(scale, latency=1e-3, memory=1e10)
    places = scale.crossings(cluster, SIZE, scale.hierarchical_direct, scale.hierarchical_doubling)
    for ranks, following in zip(scale.SIZES, scale.SIZES[1:], strict=False):
        faster = [
            scale.hierarchical_direct(cluster, scale.nodes_of(cluster, number), SIZE)
            < scale.hierarchical_doubling(cluster, scale.nodes_of(cluster, number), SIZE)
            for number in (ranks, following)
        ]
        assert (following in places) == (faster[0] != faster[1])


def test_the_program_predicts_and_judges(tmp_path):
    command = [warm_python(), str(BENCHMARKS / "scale.py")]
    output = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    assert output.count("\n  16384 ") == 2
    assert "cross at" in output
    measured = tmp_path / "measured.json"
    network = ["--latency", "1e-4", "--overhead", "1e-6", "--sync", "1e-5", "--memory", "1e10", "--gbit", "0.8"]
    for mbit in (800, 0):
        for seconds, status in ((0.27, 0), (0.6, 1)):
            times = {"direct": {"median": seconds}, "gloo": {"median": 1e3}}
            row = {"hosts": 2, "local": 2, "mbit": mbit, "size": SIZE, "seconds": times}
            measured.write_text(json.dumps({"rows": [row]}))
            judged = subprocess.run([*command, *network, "--check", str(measured)], capture_output=True, timeout=60)
            assert judged.returncode == status, judged.stdout + judged.stderr


def test_the_model_agrees_with_what_was_measured():
    command = [warm_python(), str(BENCHMARKS / "scale.py"), "--check", str(BENCHMARKS / "results" / "scale.json")]
    judged = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert judged.returncode == 0, judged.stdout + judged.stderr
    assert judged.stdout.count("\n") == 1 + 12, "six algorithms on two and on four hosts"


def test_the_model_agrees_with_what_was_published(scale):
    assert scale.compare_published()
    # Without any communication, or with much more of it, it would not.
    assert scale.efficiencies(scale.Training(1, 142, 0.9))[0] > 0.9
    assert scale.efficiencies(scale.Training(1e9, 154, 0.68))[1] < 0.68


@pytest.fixture
def many_ranks(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("many_ranks")


def test_the_work_of_many_ranks(many_ranks):
    # Messages, bytes between nodes, bytes in nodes, ranks that synchronise.
    assert many_ranks.work(4, 2, 4096) == [12, 12 * 4096, 8 * 4096, 16]  # whole
    assert many_ranks.work(64, 1, 4096) == [64 * 6, 64 * 6 * 4096, 0, 0]  # doubling
    assert many_ranks.work(67, 1, 4096)[0] == 64 * 6 + 2 * 3
    # Of 25 MiB, direct among 8 and in a ring of 64, each slice takes 13 and 2 parts.
    assert many_ranks.work(8, 1, SIZE) == [8 * 7 * 2 * 13, 14 * SIZE, 0, 0]
    assert many_ranks.work(64, 1, SIZE) == [64 * 63 * 2 * 2, 126 * SIZE, 0, 0]
    rails, chunks = _C.choose_rails(32, 64, SIZE, False)
    messages, between, within, synchronising = many_ranks.work(32, 64, SIZE)
    assert (messages, between) == (32 * rails * chunks * 62, 62 * SIZE)
    assert (within, synchronising) == (2048 * SIZE, 2048 * 13 * (chunks + 3))  # chunks of 6.25 MiB, stages of 512 KiB
    assert many_ranks.work(32, 4, 4096)[0] == 32 * 5 + 32  # doubling, and one more for each node to agree


def test_costs_are_found_again(many_ranks):
    costs = [1e-5, 0.0, 2e-10, 3e-6]
    rows = [
        {"nodes": nodes, "local": local, "size": size, "seconds": sum(map(float.__mul__, costs, map(float, work))) / 2}
        for nodes, local in many_ranks.FEW
        for size in (4096, 1 << 16, 1 << 20, SIZE)
        for work in [many_ranks.work(nodes, local, size)]
    ]
    assert many_ranks.fit(rows, cores=2).tolist() == pytest.approx(costs, rel=1e-6, abs=1e-15)


def test_many_ranks_are_measured_and_judged(many_ranks, monkeypatch, tmp_path, capsys):
    program = cpp_make.make("tcp_path")
    monkeypatch.setattr(many_ranks, "build", lambda: program)
    monkeypatch.setattr(many_ranks, "FEW", ((2, 1),))
    monkeypatch.setattr(many_ranks, "MANY", ((2, 2),))
    path = tmp_path / "r.json"
    monkeypatch.setattr("sys.argv", ["many_ranks.py", "--time-budget", "0", "--limit", "1000", "--json", str(path)])
    assert many_ranks.main() == 0
    rows = json.loads(path.read_text())["rows"]
    assert [(row["nodes"], row["local"]) for row in rows] == [(2, 1)] * 4 + [(2, 2)] * 4
    assert all(row["seconds"] > 0 for row in rows)
    assert re.search(r"2 x 2 +25 MiB +direct ", capsys.readouterr().out)
    # Of a case that takes ten thousand times as long, the prediction is off.
    rows[-1]["seconds"] *= 1e4
    path.write_text(json.dumps({"cores": 2, "rows": rows}))
    monkeypatch.setattr("sys.argv", ["many_ranks.py", "--load", str(path), "--limit", "100"])
    assert many_ranks.main() == 1


def test_what_many_ranks_do_is_what_they_take(many_ranks, monkeypatch):
    results = BENCHMARKS / "results" / "many_ranks.json"
    monkeypatch.setattr("sys.argv", ["many_ranks.py", "--load", str(results), "--limit", "3"])
    assert many_ranks.main() == 0
