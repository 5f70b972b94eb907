"""Subgroups, splits, merges and meshes, and what groups leave behind."""

from __future__ import annotations

import datetime
import json
import os
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from patience import check_soon
from probes import (
    BINDS_CPUS,
    HAS_BACKEND_OPTIONS,
    HAS_SPLIT_WITHOUT_DEVICE,
    backend_of,
    failed_with,
    threads_named,
    total,
)
from ranks import RankPool, in_ranks, run_ranks
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from ourddp import _C as core

# --- sub-groups ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world", [2, 4])
@in_ranks(None, "nodes")
def test_new_group(rank: int, world: int) -> None:
    half, value = world // 2, rank + 1.0
    everyone = list(range(world))
    lists = [everyone, everyone[:half], everyone[half:], everyone[::2], everyone[1::2]]
    lists += [[each for each in reversed(everyone) if each != 2], *([each] for each in everyone)]
    groups = [dist.new_group(members) for members in lists] + [dist.new_group(), dist.new_group(backend="ours")]
    for members, group in zip([*lists, everyone, everyone], groups, strict=True):
        if rank not in members:
            continue
        threads = threads_named("ours_comm")
        assert total(group, value) == sum(each + 1 for each in members)
        if len(members) == 1:
            assert dist.all_reduce(torch.ones(2), group=group, async_op=True).is_completed()
            assert threads_named("ours_comm") == threads, "a group of one rank needs no thread"
    for members, group in zip([*lists, everyone, everyone], groups, strict=True):
        if rank in members:
            dist.destroy_process_group(group)
    assert total(value=value) == world * (world + 1) / 2


@in_ranks(3, "nodes", fresh=True)
def test_errors_name_the_global_ranks_of_a_subgroup(rank: int, world: int) -> None:
    group = dist.new_group(list(reversed(range(world))), use_local_synchronization=True)
    gathered = [torch.empty(1) for _ in range(world)]
    dist.all_gather(gathered, torch.tensor([float(rank)]), group=group)
    # torch sorts the ranks of a new group
    assert [int(t) for t in gathered] == list(range(world))
    with pytest.raises(dist.DistBackendError, match=r"\[in group .*global ranks 1, 2\]"):
        partial = dist.new_group([1, 2])
        if rank in (1, 2):
            dist.all_reduce(torch.ones(rank), group=partial)
        else:
            raise dist.DistBackendError("[in group of others, whose ranks are the global ranks 1, 2]")


# --- splits, merges and shrinking ------------------------------------------------------------------------------------


def splits(rank: int, world: int) -> None:
    halves = [[0, 2], [1, 3]]
    mine = halves[rank % 2]
    half = dist.split_group(split_ranks=halves, group_desc="halves")
    assert half is not None
    assert dist.get_backend(half) == "ours"
    assert half.size() == len(mine)
    assert total(half, float(rank)) == sum(mine)
    first_and_last = dist.split_group(split_ranks=[[3, 0]])
    if rank in (0, 3):
        assert first_and_last.rank() == (0 if rank == 3 else 1)
        assert total(first_and_last) == 2
    else:  # what a rank outside the group gets differs between torch versions; it is never a group
        assert not isinstance(first_and_last, dist.ProcessGroup)
    # The child must not have changed the parent's options.
    if HAS_BACKEND_OPTIONS:
        assert backend_of().options._timeout == datetime.timedelta(seconds=60)
    assert total() == world


@pytest.mark.skipif(not HAS_SPLIT_WITHOUT_DEVICE, reason="torch splits groups without an accelerator from 2.15 on")
@pytest.mark.parametrize("device", [None, torch.device("cpu:0")])
def test_split_group(device, nodes):
    run_ranks(4, splits, device_id=device, nodes=nodes)


@in_ranks(4, "nodes", fresh=True)
def test_merge_of_two_halves(rank: int, world: int) -> None:
    """The halves know their global ranks; the merged group does not, since its ranks are numbered anew."""
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    store = dist.PrefixStore("merged", dist.distributed_c10d._get_default_store())
    whole = halves[rank // 2].merge_remote_group(store, world, datetime.timedelta(seconds=20), "whole")
    for _ in range(2):
        whole.allreduce([tensor := torch.ones(1)]).wait()
        assert tensor.item() == world
    if core.records_flights():
        from torch._C._distributed_c10d import _dump_fr_trace_json

        dist.all_reduce(torch.ones(1))
        assert list(json.loads(_dump_fr_trace_json(backend="ours"))["pg_config"]) == ["0"]


@in_ranks(3, "nodes", fresh=True)
def test_shrink_group(rank: int, world: int) -> None:
    if rank != 1:
        group = dist.shrink_group([1])
        group.allreduce([tensor := torch.full((1,), float(rank))]).wait()
        assert (group.rank(), tensor.item()) == (rank // 2, 2.0)


def shrinks_past_a_stuck_rank(rank: int, world: int) -> float:
    store = dist.distributed_c10d._get_default_store()
    if rank == 1:
        store.wait(["0 has shrunk", "2 has shrunk"])
        return 0.0
    dist.all_reduce(torch.ones(4), async_op=True)
    message = dist.irecv(torch.ones(4), 1)
    began = time.monotonic()
    group = dist.shrink_group([1], shrink_flags=dist.distributed_c10d.SHRINK_ABORT)
    took = time.monotonic() - began
    with pytest.raises(dist.DistBackendError, match="SHRINK_ABORT"):
        message.wait()
    group.allreduce([tensor := torch.ones(1)]).wait()
    assert tensor.item() == 2
    store.set(f"{rank} has shrunk", "")
    return took


def test_shrink_group_with_abort_waits_for_no_operation(nodes):
    check_soon(3, lambda: max(run_ranks(3, shrinks_past_a_stuck_rank, nodes=nodes, pg_timeout=30)))


# --- devices that do not exist ---------------------------------------------------------------------------------------


@pytest.mark.skipif(not BINDS_CPUS, reason="this torch binds groups to accelerators only")
@in_ranks(2, "nodes", fresh=True, device_id=torch.device("cpu:0"))
def test_groups_of_some_ranks_with_a_bound_device(rank: int, world: int) -> None:
    group = dist.new_group([0])
    assert (group == dist.GroupMember.NON_GROUP_MEMBER) == (rank != 0)
    mine, _ = dist.new_subgroups(1)
    assert total(mine) == 1
    mesh = init_device_mesh("cpu", (1, world), mesh_dim_names=("outer", "inner"))
    assert total(mesh.get_group("inner")) == world
    assert total(mesh.get_group("outer")) == 1
    assert total() == world


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there are devices for which barriers wait")
@in_ranks(2, "nodes", fresh=True)
def test_a_barrier_may_name_devices_that_do_not_exist(rank: int, world: int) -> None:
    for _ in range(2):
        dist.barrier(device_ids=[rank])
        options = dist.BarrierOptions()
        options.device_ids = [rank]
        backend_of().barrier(options).wait()
        options.device = torch.device("cuda", rank)
        backend_of().barrier(options).wait()
        with FakeTensorMode():  # from now on, torch's guard for CUDA says that there is a device
            pass
    assert total() == world


# --- meshes ----------------------------------------------------------------------------------------------------------


@in_ranks(4, "nodes", fresh=True)
def test_device_mesh_and_dtensor(rank: int, world: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    inner, outer = mesh.get_group("inner"), mesh.get_group("outer")
    assert backend_of(inner).name() == "ours"
    assert total(inner, float(rank)) == 2 * rank + (1 if rank % 2 == 0 else -1)
    assert total(outer, float(rank)) == rank + (rank + 2) % 4
    nested = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("a", "b", "c"))
    assert total(nested.get_group("b"), float(rank)) == rank
    assert total(nested["c"].get_group(), float(rank)) == total(inner, float(rank))
    whole = torch.arange(16.0).view(4, 4)
    sharded = distribute_tensor(whole, mesh, [Shard(0), Shard(1)])
    assert torch.equal(sharded.redistribute(mesh, [Replicate(), Replicate()]).to_local(), whole)
    assert isinstance(sharded, DTensor)


@in_ranks(2, "nodes", backend=None, fresh=True)
def test_detail_debug_mode(rank: int, world: int) -> None:
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    dist.init_process_group("ours")
    tensor = torch.ones(4)
    dist.all_reduce(tensor)
    assert tensor[0].item() == world
    gathered: list[Any] = [None] * world
    dist.all_gather_object(gathered, rank)
    assert gathered == list(range(world))
    group = dist.new_group()
    assert total(group) == world
    dist.barrier()
    for work in dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, torch.full((1,), float(rank)), (rank + 1) % world),
            dist.P2POp(dist.irecv, tensor[:1], (rank - 1) % world),
        ]
    ):
        work.wait()
    assert tensor[0].item() == (rank - 1) % world
    assert type(backend_of()).__name__ == "_ProcessGroupWrapper"


# --- what groups leave behind ----------------------------------------------------------------------------------------


@in_ranks(1, fresh=True)
def test_a_world_of_one_needs_no_thread(rank: int, world: int) -> None:
    backend = backend_of()
    works = [dist.all_reduce(torch.ones(3), async_op=True) for _ in range(3)]
    assert all(work.is_completed() for work in works)
    with pytest.raises(ValueError, match="another rank"):
        backend.send([torch.ones(1)], 0, 0)
    backend.abort()
    assert failed_with("COMM_ERROR")
    with pytest.raises(dist.DistBackendError, match="aborted"):
        dist.all_reduce(torch.ones(3))
    assert not threads_named("ours_comm")


@in_ranks(2, "nodes")
def test_destroying_a_group_completes_what_is_queued(rank: int, world: int) -> None:
    group = dist.new_group()
    work = dist.all_reduce(torch.ones(300_000), group=group, async_op=True)
    backend = backend_of(group)
    dist.destroy_process_group(group)  # completes what is queued
    assert work.is_completed()
    assert work.is_success()
    with pytest.raises(RuntimeError, match="was shut down"):
        backend.barrier(dist.BarrierOptions())
    assert total() == world


def many(rank: int, world: int) -> int:
    for _ in range(25):
        group = dist.new_group()
        dist.all_reduce(torch.ones(10), group=group, async_op=True).wait()
        dist.destroy_process_group(group)
    return len(os.listdir("/proc/self/fd"))


def test_groups_release_their_descriptors(nodes):
    with RankPool(2, nodes=nodes) as pool:
        first = pool.run(many)
        second = pool.run(many)
    assert max(b - a for a, b in zip(first, second, strict=True)) < 25, "file descriptors leak"
