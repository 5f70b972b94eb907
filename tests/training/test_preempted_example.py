"""examples/train.py ends well after SIGTERM to one rank, and the training can be resumed."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from example_programs import EXAMPLES
from programs import job, run_programs

# Rank 2 gets SIGTERM when it has begun its fifth step.
STOPPED = """
import os, runpy, signal, sys
import torch
step = torch.optim.SGD.step
steps = 0
def counted(*args, **kwargs):
    global steps
    steps += 1
    if os.environ["RANK"] == "2" and steps == 5:
        os.kill(os.getpid(), signal.SIGTERM)
    return step(*args, **kwargs)
torch.optim.SGD.step = counted
sys.path.insert(0, os.path.dirname(sys.argv[0]))
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_the_training_ends_well_and_goes_on_where_it_stopped(tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint.pt"
    argv = [str(EXAMPLES / "train.py"), "--epochs", "2", "--checkpoint", str(checkpoint)]
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    done = run_programs(STOPPED, job(4, store), argv=argv)
    assert [(one.returncode, one.stderr) for one in done] == [(0, "")] * 4
    state = torch.load(checkpoint, weights_only=True)
    # The next all-reduces are those of the sixth step.
    step = state["samples"] // (16 * 4)
    assert (state["epoch"], step) == (-1, 6)
    assert f"asked to stop: ended after step {step}" in done[0].stdout
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    again = run_programs(STOPPED.replace("SIGTERM", "SIGCONT"), job(4, store), argv=[*argv, "--resume"])
    assert [one.returncode for one in again] == [0] * 4
    assert f"resumed after epoch 0 and {step} batches of the next" in again[0].stdout
    assert "held-out accuracy" in again[0].stdout
    assert torch.load(checkpoint, weights_only=True)["epoch"] == 1
