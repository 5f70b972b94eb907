"""The examples of libraries that train over the backend. Those that are not installed are skipped."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch.distributed as dist
from example_programs import EXAMPLES
from programs import job, run_file

SHORT = ("--steps", "12", "--batch-size", "12")
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "DO_NOT_TRACK": "1", "RUST_LOG": "warn"}
LAST_LINE = re.compile(r"backend (\w+), loss ([\d.]+), held-out accuracy [\d.]+%")


def run(name: str, folder: Path, backend: str, flags: tuple[str, ...], ranks: int = 2) -> str:
    """Run an example of the folder `libraries` without a network, and return what rank 0 prints."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    each = [{**env, **OFFLINE, "HOME": str(folder)} for env in job(ranks, store)]
    done = run_file(EXAMPLES / "libraries" / name, "--backend", backend, *SHORT, *flags, each=each)
    assert [status for status, _ in done] == [0] * ranks, "\n".join(output for _, output in done)
    return done[0][1]


def same_as_gloo(library: str, name: str, folder: Path, *flags: str, theirs: tuple[str, ...] = ()) -> str:
    """Check that an example trains over `ours` as it does over Gloo with the flags `theirs`.

    Return what it prints over `ours`.
    """
    pytest.importorskip(library, reason=f"{library} is not installed: pip install '.[libraries]'")
    outputs = {"gloo": run(name, folder, "gloo", flags + theirs), "ours": run(name, folder, "ours", flags)}
    losses = []
    for backend, output in outputs.items():
        found = LAST_LINE.search(output)
        assert found is not None, output
        assert found[1] == backend
        losses.append(float(found[2]))
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    return outputs["ours"]


def test_a_compiled_model_is_cut_at_its_buckets(tmp_path: Path) -> None:
    assert "2 graphs" in same_as_gloo("torch", "compiled.py", tmp_path, "--compiler", "aot_eager")


def test_metrics_count_the_samples_of_all_ranks(tmp_path: Path) -> None:
    output = same_as_gloo("torchmetrics", "metrics.py", tmp_path)
    [expected, counted] = re.findall(r"accuracy ([\d.]+%)", output)
    assert counted == expected
    assert "of 359 images" in output


@pytest.mark.parametrize(
    ("library", "name"),
    [
        ("lightning", "lightning_digits.py"),
        ("accelerate", "accelerate_digits.py"),
        ("transformers", "trainer.py"),
    ],
)
def test_trainers_take_our_data_parallel(library: str, name: str, tmp_path: Path) -> None:
    output = same_as_gloo(library, name, tmp_path, theirs=("--ddp", "torch"))
    assert "(rank 0 of 2, ours)" in output  # the report


@pytest.mark.parametrize("stage", ["2", "3"])
def test_deepspeed_cuts_gradients_and_optimizer(stage: str, tmp_path: Path) -> None:
    same_as_gloo("deepspeed", "deepspeed_zero.py", tmp_path, "--stage", stage)


def test_fault_tolerance_has_the_losses_of_gloo(tmp_path: Path) -> None:
    same_as_gloo("torchft", "fault_tolerance.py", tmp_path)


def test_the_ranks_that_are_left_go_on(tmp_path: Path) -> None:
    pytest.importorskip("torchft", reason="torchft is not installed: pip install '.[libraries]'")
    output = run("fault_tolerance.py", tmp_path, "ours", ("--die", "4"), ranks=3)
    assert "rank 0: step 4 with 3 ranks was not taken" in output
    assert "rank 0: step 5 with 2 ranks was taken" in output
    assert LAST_LINE.search(output)[1] == "ours"
