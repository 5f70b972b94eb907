"""The model of benchmarks/scale.py: its algorithms send what theory says, and it is judged by measurements."""

from __future__ import annotations

import importlib
import json
import subprocess
from pathlib import Path
from types import ModuleType

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
    assert output.count("\n  4096 ") == 2
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
