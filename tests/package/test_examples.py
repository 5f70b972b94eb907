"""The example programs: once as users start them, and many times inside ranks that have loaded torch already."""

from __future__ import annotations

import argparse
import functools
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from example_programs import EXAMPLES, Run, import_example
from programs import environment, job, run_file, run_programs

GLOO = ("--backend", "gloo", "--ddp", "torch")
OURS = ("--backend", "ours", "--ddp", "ours")
SMALL = {"corpus": 20_000, "context": 32, "width": 32, "layers": 2, "sample": 40, "epochs": 2}
SMALL_GPT = tuple(word for name, value in SMALL.items() for word in (f"--{name}", str(value)))
TIMEOUT = 120


def read_epochs(path: Path) -> list[dict[str, Any]]:
    """Return a metrics file's epochs without the measured speeds."""
    epochs = [json.loads(line) for line in path.read_text().splitlines()]
    for epoch in epochs:
        for part in ("train", "held_out"):
            assert epoch[part].pop("samples_per_second") > 0
    return epochs


def curve(epochs: list[dict[str, Any]]) -> list[float]:
    return [epoch[part]["loss"] for epoch in epochs for part in ("train", "held_out")]


@pytest.fixture(scope="module")
def whole_training(run_example: Run) -> Callable[..., tuple[list[dict[str, Any]], dict[str, Any], str]]:
    """Return the metrics, last checkpoint and output of three epochs of train.py, which runs once for all tests."""

    @functools.cache
    def train(ranks: int, flags: tuple[str, ...]) -> tuple[list[dict[str, Any]], dict[str, Any], str]:
        with tempfile.TemporaryDirectory() as folder:
            metrics, checkpoint = Path(folder) / "metrics.jsonl", Path(folder) / "checkpoint.pt"
            files = ("--metrics", str(metrics), "--checkpoint", str(checkpoint))
            output = run_example("train.py", ranks, *flags, "--epochs", "3", *files)
            assert sorted(os.listdir(folder)) == ["checkpoint.pt", "metrics.jsonl"]
            return read_epochs(metrics), torch.load(checkpoint, weights_only=True), output

    return train


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_loss_curve_equals_that_of_gloo(ranks: int, whole_training: Any) -> None:
    ours, _, _ = whole_training(ranks, OURS)
    gloo, _, _ = whole_training(ranks, GLOO)
    assert [epoch["epoch"] for epoch in ours] == [0, 1, 2]
    # Sums in another order differ in their last bits, and each training step enlarges the difference a little.
    assert curve(ours) == pytest.approx(curve(gloo), rel=1e-3)
    assert curve(ours)[-1] < curve(ours)[1] / 2  # it learns


def test_digits_reach_the_expected_accuracy(whole_training: Any) -> None:
    _, _, output = whole_training(2, OURS)
    accuracy = re.search(r"held-out accuracy: ([\d.]+)%", output)
    assert accuracy is not None
    assert float(accuracy[1]) > 95


def test_resumed_training_is_bit_identical(tmp_path: Path, run_example: Run, whole_training: Any) -> None:
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


@pytest.mark.parametrize("name", ["train.py", "train_gpt.py"])
def test_a_training_can_be_resumed_with_other_epochs_ranks_and_rates(
    name: str, tmp_path: Path, run_example: Run
) -> None:
    metrics, checkpoint = tmp_path / "metrics.jsonl", tmp_path / "folder" / "checkpoint.pt"
    small = SMALL_GPT if name == "train_gpt.py" else ()
    flags = (*OURS, *small, "--metrics", str(metrics), "--checkpoint", str(checkpoint), "--resume")
    run_example(name, 2, *flags, "--epochs", "1")
    output = run_example(name, 4, *flags, "--epochs", "3", "--lr", "0.002", "--batch-size", "8")
    assert re.search(
        r"^resumed after epoch 1, epochs 3 instead of 1, batch_size 8 .*ranks 4 instead of 2$", output, re.M
    )
    epochs = read_epochs(metrics)
    assert [epoch["epoch"] for epoch in epochs] == [0, 1, 2]
    assert epochs[2]["held_out"]["loss"] < epochs[0]["held_out"]["loss"]


def test_the_learning_rate_is_scaled_with_the_batch_of_all_ranks() -> None:
    train = import_example("train")
    flags = argparse.Namespace(lr=0.5, batch_size=16, scale_lr=True)
    assert [train.peak_rate(flags, ranks) for ranks in (1, 2, 8)] == [0.5, 1.0, 4.0]
    flags.batch_size = 8
    assert train.peak_rate(flags, 8) == 2.0
    flags.scale_lr = False
    assert train.peak_rate(flags, 8) == 0.5


def test_a_learning_rate_rises_and_falls() -> None:
    common = import_example("common")
    schedule = {"start": 1.0, "peak": 4.0, "warm_up": 10}
    rates = [common.learning_rate(step, 100, **schedule) for step in range(101)]
    assert rates[0] == 1
    assert max(rates) == rates[10] == pytest.approx(4.0, rel=0.03)
    assert rates[:11] == sorted(rates[:11])
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert rates[100] == 0
    assert common.learning_rate(0, 100, start=2.0, peak=2.0, warm_up=0) == 2


def test_gpt_learns_resumes_and_writes(tmp_path: Path, run_example: Run) -> None:
    metrics, checkpoint = tmp_path / "metrics.jsonl", tmp_path / "checkpoint.pt"
    flags = (*OURS, *SMALL_GPT, "--metrics", str(metrics), "--checkpoint", str(checkpoint))
    run_example("train_gpt.py", 2, *flags, "--stop-after", "1")
    output = run_example("train_gpt.py", 2, *flags, "--resume")
    first, second = read_epochs(metrics)
    assert (first["epoch"], second["epoch"]) == (0, 1)
    assert second["held_out"]["loss"] < first["held_out"]["loss"] < 5  # guessing costs log(256) = 5.55
    sample = output.rpartition("\n\n")[2]
    assert sample.startswith("def ")
    assert len(sample) > 20
    [(status, output)] = run_file(EXAMPLES / "train_gpt.py", *flags, "--resume", "--width", "64")
    assert status == 1
    assert "was made with --width 32, this run has --width 64" in output
    assert "Traceback" not in output


def test_weighted_gradients_are_those_of_one_process(run_example: Run) -> None:
    size = {name: SMALL[name] for name in ("corpus", "context", "width", "layers")}
    flags = [word for name, value in size.items() for word in (f"--{name}", str(value))]
    output = run_example("weighted.py", 3, *flags, "--steps", "9", "--compare-every", "2")
    found = re.findall(r"gradients differ from one process's by (\S+), the mean of means by (\S+)$", output, re.M)
    assert len(found) == 5
    for weighted, means in found:
        assert float(weighted) < 1e-5
        assert float(means) > 1e-2


def test_torchrun_with_default_flags() -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    command = [*torchrun, str(EXAMPLES / "train.py"), "--epochs", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, env=environment(), check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 ranks, 1438 images to train on, 359 held out" in done.stdout
    assert re.search(r"epoch +1 .* images/s\nheld-out accuracy: ", done.stdout)


def test_train_runs_without_torchrun_and_refuses_another_seed(tmp_path: Path) -> None:
    flags = ("--epochs", "1", "--checkpoint", str(tmp_path / "checkpoint.pt"))
    [(status, output)] = run_file(EXAMPLES / "train.py", *flags)
    assert status == 0, output
    assert "1 ranks, 1438 images" in output
    refusal = "was made with --seed 0, this run has --seed 2: use the same, or start without --resume"
    again = run_file(EXAMPLES / "train.py", *flags, "--resume", "--seed", "2")
    assert again == [(1, f"{tmp_path / 'checkpoint.pt'} {refusal}\n")]


class Group:
    """Stands in for a process group of one rank."""

    def __init__(self, common: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        for name, value in {"get_rank": 0, "get_world_size": 1}.items():
            monkeypatch.setattr(common.dist, name, lambda value=value: value)
        monkeypatch.setattr(common.dist, "broadcast_object_list", lambda objects, src: None)


def test_a_file_that_cannot_be_written_is_refused_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    common = import_example("common")
    Group(common, monkeypatch)
    (tmp_path / "file").touch()
    for path, why in (
        (tmp_path, "it is a folder"),
        (tmp_path / "file" / "checkpoint.pt", "Not a directory|File exists"),
    ):
        for paths in ((path, None), (None, path)):
            with pytest.raises(common.Refused, match=f"cannot write {path}: ({why}).*; name "):
                common.check_files(*paths)
    common.check_files(tmp_path / "new" / "checkpoint.pt", None)
    assert sorted(os.listdir(tmp_path)) == ["file", "new"]
    assert not os.listdir(tmp_path / "new")


def test_a_file_that_is_not_a_checkpoint_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    common = import_example("common")
    Group(common, monkeypatch)
    path = tmp_path / "checkpoint.pt"
    args = argparse.Namespace(checkpoint=path, resume=True)
    path.write_text("nothing of the kind")
    with pytest.raises(common.Refused, match=f"cannot resume from {path}: .*; start without --resume"):
        common.load_checkpoint(args, ())
    torch.save({"epoch": 1}, path)
    with pytest.raises(common.Refused, match="it is no checkpoint of this program"):
        common.load_checkpoint(args, ())


# Interrupts each rank as a terminal does, when rank 0 has printed that an epoch is over.
INTERRUPTED = """
import io, os, runpy, signal, sys, threading, torch.distributed as dist
def store():
    return dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
def interrupt():
    store().wait(["all ranks are training"])
    os.kill(os.getpid(), signal.SIGINT)
class Output(io.StringIO):
    def write(self, text):
        if text.startswith("epoch"):
            store().set("all ranks are training", "")
sys.stdout = Output()
threading.Thread(target=interrupt).start()
sys.path.insert(0, os.path.dirname(sys.argv[0]))
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_an_interrupt_prints_one_line_for_each_rank() -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    done = run_programs(INTERRUPTED, job(4, store), argv=[str(EXAMPLES / "train.py"), "--epochs", "1000000"])
    assert [one.stderr for one in done] == [f"rank {rank}: interrupted\n" for rank in range(4)]
    assert all(one.returncode != 0 for one in done)
