"""The example programs as their users run them: under torchrun, from the command line."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
GLOO = ("--backend", "gloo", "--ddp", "torch")
OURS = ("--backend", "ours", "--ddp", "ours")
SMALL_GPT = (
    "--corpus",
    "20000",
    "--context",
    "32",
    "--width",
    "32",
    "--layers",
    "2",
    "--sample",
    "40",
    "--epochs",
    "2",
)
TIMEOUT = 120


def run_example(name: str, ranks: int, *flags: str) -> str:
    """Return what the example printed; fail with all of its output where it fails or takes too long."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    process = subprocess.Popen(
        [*command, str(EXAMPLES / name), "--no-progress", *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=TIMEOUT)
    except subprocess.TimeoutExpired:
        output = f"did not end within {TIMEOUT} s"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # torchrun's ranks, where it did not end them
        process.wait()
    assert process.returncode == 0, f"{name} {' '.join(flags)}:\n{output}"
    return output


def read_epochs(path: Path) -> list[dict[str, Any]]:
    """Return a metrics file's epochs without what depends on the clock."""
    epochs = [json.loads(line) for line in path.read_text().splitlines()]
    for epoch in epochs:
        for part in ("train", "held_out"):
            assert epoch[part].pop("samples_per_second") > 0
    return epochs


@functools.cache
def whole_training(ranks: int, flags: tuple[str, ...]) -> tuple[list[dict[str, Any]], dict[str, Any], str]:
    """Return metrics, last checkpoint and output of three epochs of train.py; run once for all tests."""
    with tempfile.TemporaryDirectory() as folder:
        metrics, checkpoint = Path(folder) / "metrics.jsonl", Path(folder) / "checkpoint.pt"
        files = ("--metrics", str(metrics), "--checkpoint", str(checkpoint))
        output = run_example("train.py", ranks, *flags, "--epochs", "3", *files)
        assert sorted(os.listdir(folder)) == ["checkpoint.pt", "metrics.jsonl"]
        return read_epochs(metrics), torch.load(checkpoint, weights_only=True), output


def curve(epochs: list[dict[str, Any]]) -> list[float]:
    return [epoch[part]["loss"] for epoch in epochs for part in ("train", "held_out")]


@pytest.mark.parametrize("ranks", [2, 4])
def test_loss_curve_is_that_of_gloo(ranks: int) -> None:
    ours, _, _ = whole_training(ranks, OURS)
    gloo, _, _ = whole_training(ranks, GLOO)
    assert [epoch["epoch"] for epoch in ours] == [0, 1, 2]
    # Sums in another order differ in their last bits, and training makes a little more of it every step.
    assert curve(ours) == pytest.approx(curve(gloo), rel=1e-3)
    assert curve(ours)[-1] < curve(ours)[1] / 2  # it learns


def test_digits_reach_their_accuracy() -> None:
    _, _, output = whole_training(2, OURS)
    accuracy = re.search(r"held-out accuracy: ([\d.]+)%", output)
    assert accuracy is not None
    assert float(accuracy[1]) > 95


def test_resumed_training_is_bit_identical(tmp_path: Path) -> None:
    metrics, checkpoint = tmp_path / "metrics.jsonl", tmp_path / "checkpoint.pt"
    flags = (*OURS, "--epochs", "3", "--metrics", str(metrics), "--checkpoint", str(checkpoint))
    run_example("train.py", 4, *flags, "--stop-after", "1")
    assert torch.load(checkpoint, weights_only=True)["epoch"] == 0
    run_example("train.py", 4, *flags, "--resume")
    epochs, whole, _ = whole_training(4, OURS)
    resumed = torch.load(checkpoint, weights_only=True)
    assert read_epochs(metrics) == epochs
    assert resumed["epoch"] == whole["epoch"] == 2
    for name, value in whole["model"].items():
        assert torch.equal(resumed["model"][name], value), name
    for name, state in whole["optimizer"]["state"].items():
        for key, value in state.items():
            assert torch.equal(resumed["optimizer"]["state"][name][key], value), (name, key)


def test_resume_refuses_another_seed(tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint.pt"
    torch.save({"epoch": 0, "seed": 1}, checkpoint)
    with pytest.raises(AssertionError, match=r"ValueError: .* was made with --seed 1, this run has --seed 2"):
        run_example("train.py", 1, *OURS, "--seed", "2", "--checkpoint", str(checkpoint), "--resume")


def test_gpt_learns_resumes_and_writes(tmp_path: Path) -> None:
    metrics, checkpoint = tmp_path / "metrics.jsonl", tmp_path / "checkpoint.pt"
    flags = (*OURS, *SMALL_GPT, "--metrics", str(metrics), "--checkpoint", str(checkpoint))
    run_example("train_gpt.py", 2, *flags, "--stop-after", "1")
    output = run_example("train_gpt.py", 2, *flags, "--resume")
    first, second = read_epochs(metrics)
    assert (first["epoch"], second["epoch"]) == (0, 1)
    assert second["held_out"]["loss"] < first["held_out"]["loss"] < 5  # a guess costs log(256) = 5.55
    sample = output.rpartition("\n\n")[2]
    assert sample.startswith("def ")
    assert len(sample) > 20


def test_runs_without_torchrun() -> None:
    program = [sys.executable, str(EXAMPLES / "train.py"), *OURS, "--epochs", "1", "--no-progress"]
    result = subprocess.run(program, capture_output=True, text=True, timeout=TIMEOUT, check=False)
    assert result.returncode == 0, result.stderr
    assert "1 ranks" in result.stdout
    assert "held-out accuracy" in result.stdout
