"""A few tests of PyTorch's own suite, at world size 2, in every run of the test suite; the whole is run by run.py."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from programs import warm_python

_RUN = Path(__file__).with_name("run.py")
_TESTS = (
    "test_all_reduce_coalesced_sum",
    "test_all_to_all_single_unequal_split",
    "test_barrier_timeout_full_group",
    "test_batch_isend_irecv_gloo_tags",
    "test_ddp_comparison",
    "test_ddp_profiling_torch_profiler",
    "test_DistributedDataParallelCPU_grad_is_view",
    "test_gather",
    "test_monitored_barrier_gloo_rank_0_timeout",
    "test_send_recv_any_source_torch_profiler",
    "test_sparse_all_reduce_sum",
)


@pytest.mark.parametrize(("ddp", "nodes"), [("torch", 1), ("ours", 1), ("ours", 2)])
def test_a_few_of_pytorchs_own_tests_pass(ddp: str, nodes: int) -> None:
    """The chosen tests pass with our backend in Gloo's place, under torch's DDP and under ours, also on two nodes."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("expecttest")
    if tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 15):
        pytest.skip("torch before 2.15 does not build Gloo as a plugin that can be replaced")
    pattern = f"^({'|'.join(_TESTS)})$"
    command = [
        warm_python(),
        str(_RUN),
        "--world-sizes=2",
        f"--nodes={nodes}",
        f"--ddp={ddp}",
        "-k",
        pattern,
        "--timeout=30",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert f"{len(_TESTS)} pass" in done.stdout, done.stdout[-6000:]
