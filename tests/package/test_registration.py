"""The backend's name: how torch learns of it, and which names make a group with it."""

from __future__ import annotations

import datetime
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from probes import HAS_BACKEND_OPTIONS, backend_of, failed_with, total
from ranks import in_ranks, run_ranks

import ourddp
import ourddp._C as core


def test_registering_twice_changes_nothing():
    before = dist.Backend._plugins["OURS"]
    ourddp.register()
    assert dist.Backend._plugins["OURS"] is before
    assert dist.Backend.OURS == "ours"
    assert dist.Backend.backend_capability["ours"] == ["cpu", "cuda"]


def sum_and_name(rank: int, world: int) -> tuple[float, str]:
    return total(value=rank + 1.0), backend_of().name()


@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize("backend", ["ours", "OURS", "cpu:ours"])
def test_backend_strings(world, backend):
    assert run_ranks(world, sum_and_name, backend=backend) == [(world * (world + 1) / 2, "ours")] * world


@pytest.mark.skipif(not dist.is_nccl_available(), reason="this torch has no nccl to name")
@pytest.mark.skipif(not torch.cuda.is_available(), reason="nccl refuses to start without a GPU")
def test_mixed_backends_with_nccl():
    assert run_ranks(1, sum_and_name, backend="cpu:ours,cuda:nccl") == [(1.0, "ours")]


def test_mixed_backends():
    assert run_ranks(2, sum_and_name, backend="cpu:ours,cuda:gloo") == [(3.0, "ours")] * 2


@pytest.mark.parametrize("world", [1, 2, 3])
@in_ranks()
def test_identity(rank: int, world: int) -> None:
    group = dist.group.WORLD
    backend = backend_of()
    assert isinstance(backend, core.ProcessGroupOurs)
    assert backend.name() == "ours"
    assert dist.get_backend() == "ours"
    assert (backend.rank(), backend.size()) == (rank, world) == (group.rank(), group.size())
    if HAS_BACKEND_OPTIONS:
        assert backend.options._timeout == datetime.timedelta(seconds=60)
    assert backend.supports_splitting
    assert backend.supports_coalescing
    assert failed_with("SUCCESS")


def make_without_import(world: int, tmp_path: Path) -> subprocess.CompletedProcess[str]:
    code = """
import torch, torch.distributed as dist
assert "OURS" not in dist.Backend._plugins
dist.init_process_group("ours")
tensor = torch.ones(3) * (dist.get_rank() + 1)
dist.all_reduce(tensor)
print(tensor.tolist(), flush=True)
dist.destroy_process_group()
"""
    # Run in a folder without the package, so that only an installed package is found.
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={world}"]
    script = tmp_path / "script.py"
    script.write_text(code)
    return subprocess.run(
        [*command, str(script)], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )


@pytest.mark.skipif(
    not hasattr(dist.Backend, "_ensure_backend_registered"), reason="this torch does not look for installed backends"
)
def test_an_installed_backend_needs_no_import(tmp_path):
    installed = [entry for entry in entry_points(group="torch.distributed.backends") if entry.name == "ours"]
    assert installed, "the package is not installed: run make build, or pip install --no-build-isolation --editable ."
    result = make_without_import(2, tmp_path)
    assert result.stdout.count("[3.0, 3.0, 3.0]") == 2, result.stderr
