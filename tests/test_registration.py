"""Every way to a process group of backend ``ours``: names, initialisation methods, sub-groups, meshes."""

from __future__ import annotations

import inspect
import os
import socket
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch.distributed.device_mesh import init_device_mesh

import ourddp

ROOT = Path(__file__).resolve().parent.parent


def summed(rank, group=None):
    """The sum of rank + 1 over the group, by an all-reduce."""
    tensor = torch.full((5,), float(rank + 1))
    dist.all_reduce(tensor, group=group)
    assert tensor.eq(tensor[0]).all()
    return tensor[0].item()


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


# --- the name --------------------------------------------------------------------------------------------------------


def test_registering_twice_changes_nothing():
    before = dist.Backend._plugins["OURS"]
    ourddp.register()
    assert dist.Backend._plugins["OURS"] is before
    assert dist.Backend.OURS == "ours"
    assert dist.Backend.backend_capability["ours"] == ["cpu"]


def sum_and_name(rank, world):
    return summed(rank), dist.group.WORLD._get_backend(torch.device("cpu")).name()


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


def make_without_import(world, tmp_path):
    code = """
import torch, torch.distributed as dist
assert "OURS" not in dist.Backend._plugins
dist.init_process_group("ours")
tensor = torch.ones(3) * (dist.get_rank() + 1)
dist.all_reduce(tensor)
print(tensor.tolist(), flush=True)
dist.destroy_process_group()
"""
    # Run from a folder without the package, so that only what is installed is found.
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={world}"]
    script = tmp_path / "script.py"
    script.write_text(code)
    return subprocess.run(
        [*command, str(script)], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )


@pytest.mark.skipif(
    not hasattr(dist.Backend, "_ensure_backend_registered"), reason="this torch does not look for installed backends"
)
def test_no_import_is_needed(tmp_path):
    installed = [entry for entry in entry_points(group="torch.distributed.backends") if entry.name == "ours"]
    assert installed, "the package is not installed: run make build, or pip install --no-build-isolation --editable ."
    result = make_without_import(2, tmp_path)
    assert result.stdout.count("[3.0, 3.0, 3.0]") == 2, result.stderr


# --- initialisation --------------------------------------------------------------------------------------------------


def init_from_environment(rank, world, port):
    os.environ.update({"MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "False"})
    dist.init_process_group("ours")
    return summed(rank)


def init_from_url(rank, world, url):
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"
    dist.init_process_group("ours", init_method=url, rank=rank, world_size=world)
    return summed(rank)


def init_from_file_store(rank, world, path):
    dist.init_process_group("ours", store=dist.FileStore(path, world), rank=rank, world_size=world)
    return summed(rank)


def init_again(rank, world, folder):
    sums = []
    for attempt in range(3):
        dist.init_process_group("ours", init_method=f"file://{folder}/{attempt}", rank=rank, world_size=world)
        sums.append(summed(rank))
        dist.destroy_process_group()
    return sums


@pytest.mark.parametrize("world", [1, 3])
def test_environment(world):
    assert run_ranks(world, init_from_environment, free_port(), backend=None) == [world * (world + 1) / 2] * world


@pytest.mark.parametrize("world", [1, 3])
def test_urls(world, tmp_path):
    for url in (f"file://{tmp_path}/store", f"tcp://127.0.0.1:{free_port()}"):
        assert run_ranks(world, init_from_url, url, backend=None) == [world * (world + 1) / 2] * world


def test_store(tmp_path):
    assert run_ranks(3, init_from_file_store, str(tmp_path / "store"), backend=None) == [6.0] * 3


def test_groups_can_be_made_again(tmp_path):
    assert run_ranks(2, init_again, str(tmp_path), backend=None) == [[3.0] * 3] * 2


# --- groups within groups --------------------------------------------------------------------------------------------


def sub_groups(rank, world):
    everyone = dist.new_group()
    alone = [dist.new_group([each]) for each in range(world)][rank]
    halves = [dist.new_group(range(begin, begin + 2)) for begin in range(0, world, 2)]
    overlapping = dist.new_group([3, 1, 0])
    named = dist.new_group(backend="ours", group_desc="named")
    sums = [summed(rank, group) for group in (everyone, alone, halves[rank // 2], named)]
    if rank != 2:
        sums.append(summed(rank, overlapping))
    for group in (everyone, named):
        dist.destroy_process_group(group)
    return [*sums, summed(rank)]


def test_new_group():
    first, second, third, fourth = run_ranks(4, sub_groups)
    assert first == [10, 1, 3, 10, 7, 10]
    assert second == [10, 2, 3, 10, 7, 10]
    assert third == [10, 3, 7, 10, 10]
    assert fourth == [10, 4, 7, 10, 7, 10]


def mesh_sums(rank, world):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("row", "column"))
    nested = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("a", "b", "c"))
    groups = [mesh.get_group("row"), mesh.get_group("column"), nested.get_group("b"), nested["c"].get_group()]
    return [summed(rank, group) for group in groups]


def test_device_mesh():
    assert run_ranks(4, mesh_sums) == [[4, 3, 1, 3], [6, 3, 2, 3], [4, 7, 3, 7], [6, 7, 4, 7]]


def split(rank, world):
    halves = dist.split_group(split_ranks=[[0, 2], [1, 3]], group_desc="halves")
    first_three = dist.split_group(split_ranks=[[0, 1, 2]])
    assert halves is not None
    assert dist.get_backend(halves) == "ours"
    # What a rank outside gets differs between torch versions; it is never a group.
    return summed(rank, halves), summed(rank, first_three) if isinstance(first_three, dist.ProcessGroup) else None


def test_split_group():
    if "backend" not in inspect.signature(dist.split_group).parameters:
        pytest.skip("this torch splits only groups that are bound to an accelerator")
    assert run_ranks(4, split, device_id=torch.device("cpu:0")) == [(4, 6), (6, 6), (4, 6), (6, None)]
