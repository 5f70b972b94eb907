"""A few tests of PyTorch's own suite, at world size 2, in every run of the test suite; the whole is run by run.py."""

from __future__ import annotations

import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from programs import started, warm_python

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


_RUNS = [("torch", 1), ("ours", 1), ("ours", 2)]  # whose DDP, and on how many nodes


@pytest.fixture(scope="module")
def outcomes() -> dict[tuple[str, int], tuple[int, str]]:
    """Make all runs at the same time, as each waits for timeouts half of the time; return statuses and outputs."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("expecttest")
    if tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 15):
        pytest.skip("torch before 2.15 does not build Gloo as a plugin that can be replaced")
    common = [warm_python(), str(_RUN), "--world-sizes=2", "--timeout=30", "-k", f"^({'|'.join(_TESTS)})$"]
    commands = [[*common, f"--ddp={ddp}", f"--nodes={nodes}"] for ddp, nodes in _RUNS]
    # Read at the same time, or a full pipe would hold up a program.
    with started(commands, [{}] * len(commands), stderr=subprocess.STDOUT) as programs, ThreadPoolExecutor() as readers:
        outputs = list(readers.map(lambda program: program.communicate(timeout=240)[0], programs))
    found = [(program.returncode, output) for program, output in zip(programs, outputs, strict=True)]
    return dict(zip(_RUNS, found, strict=True))


@pytest.mark.parametrize("run", _RUNS, ids=lambda run: f"{run[0]}-{run[1]}")
def test_a_few_of_pytorchs_own_tests_pass(run: tuple[str, int], outcomes: dict[tuple[str, int], Any]) -> None:
    """The chosen tests pass with our backend in Gloo's place, under torch's DDP and under ours, also on two nodes."""
    status, output = outcomes[run]
    assert status == 0, output[-8000:]
    assert f"{len(_TESTS)} pass" in output, output[-6000:]
