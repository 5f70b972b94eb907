"""Making groups: every way in, sub-groups, splits, merges, and ranks that do not come."""

from __future__ import annotations

import datetime
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import RankPool, run_ranks

import ourddp._C as core

CPU = torch.device("cpu")
HAS_SPLIT_WITHOUT_DEVICE = hasattr(dist.ProcessGroup, "register_abort_hook")  # torch 2.15


def backend_of(group: Any = None) -> Any:
    return (group or dist.group.WORLD)._get_backend(CPU)


def total(group: Any = None, value: float = 1.0) -> float:
    tensor = torch.tensor([value])
    dist.all_reduce(tensor, group=group)
    return tensor.item()


def comm_threads() -> int:
    return sum(
        (task / "comm").read_text().strip() == "ours_comm"
        for task in Path("/proc/self/task").iterdir()
        if task.exists()
    )


def identity(rank: int, world: int) -> None:
    group = dist.group.WORLD
    backend = backend_of()
    assert isinstance(backend, core.ProcessGroupOurs)
    assert backend.name() == "ours"
    assert dist.get_backend() == "ours"
    assert (backend.rank(), backend.size()) == (rank, world) == (group.rank(), group.size())
    assert backend.options._timeout == datetime.timedelta(seconds=60)
    assert backend.supports_splitting
    assert backend.supports_coalescing
    assert backend.get_error().name == "SUCCESS"
    assert backend.failure() == ""


@pytest.mark.parametrize("world", [1, 2, 3])
def test_identity(rank_pool, world):
    rank_pool(world).run(identity)


# ---------------------------------------------------------------- ways in


def joined(rank: int, world: int) -> float:
    return total()


def test_init_by_file(tmp_path):
    method = f"file://{tmp_path}/store"
    assert run_ranks(3, joined, init_method=method) == [3, 3, 3]


def test_init_by_environment():
    assert run_ranks(2, init_from_environment, backend=None) == [2, 2]


def init_from_environment(rank: int, world: int) -> float:
    dist.init_process_group("cpu:ours")
    result = total()
    dist.destroy_process_group()
    return result


def init_again(rank: int, world: int) -> list[float]:
    """The same store for several groups, one after the other and with other sizes of message in between."""
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), world, is_master=False)
    results = []
    for round_number in range(4):
        dist.init_process_group("ours", store=store, rank=rank, world_size=world)
        results.append(total(value=float(round_number)))
        dist.destroy_process_group()
    return results


def test_one_store_serves_one_group_after_another():
    for results in run_ranks(3, init_again, backend=None):
        assert results == [0, 3, 6, 9]


def init_with_file_store(rank: int, world: int, path: str) -> list[float]:
    results = []
    for _ in range(2):
        dist.init_process_group("ours", store=dist.FileStore(path, world), rank=rank, world_size=world)
        results.append(total())
        dist.barrier()
        dist.destroy_process_group()
    return results


def test_file_store(tmp_path):
    assert run_ranks(2, init_with_file_store, str(tmp_path / "store"), backend=None) == [[2, 2], [2, 2]]


# ---------------------------------------------------------------- who does not come


def alone(rank: int, world: int) -> tuple[str, float]:
    if rank == world - 1:
        return "", 0.0
    start = time.monotonic()
    with pytest.raises(dist.DistBackendError) as error:
        dist.init_process_group("ours", timeout=datetime.timedelta(seconds=2))
    return str(error.value), time.monotonic() - start


def test_a_rank_that_does_not_come_is_named_at_the_timeout():
    for text, seconds in run_ranks(3, alone, backend=None)[:2]:
        assert "rank 2" in text
        assert "2000 ms" in text
        assert 1.9 < seconds < 4


def leaderless(rank: int, world: int) -> str:
    if rank == 0:
        return ""
    with pytest.raises(dist.DistBackendError) as error:
        dist.init_process_group("ours", timeout=datetime.timedelta(seconds=1))
    return str(error.value)


def test_an_absent_leader_is_named_at_the_timeout():
    for text in run_ranks(3, leaderless, backend=None)[1:]:
        assert "rank 0" in text
        assert "did not publish" in text


def elsewhere(rank: int, world: int) -> tuple[str, float]:
    start = time.monotonic()
    with pytest.raises(dist.DistBackendError) as error:
        dist.init_process_group("ours", timeout=datetime.timedelta(seconds=30))
    return str(error.value), time.monotonic() - start


def test_ranks_that_share_no_memory_get_one_clear_error():
    environments = [{"OURS_NODE_ID": f"node {rank // 2}"} for rank in range(3)]
    texts = run_ranks(3, elsewhere, backend=None, env=environments)
    assert len({text for text, _ in texts}) == 1, "the ranks tell different stories"
    text = texts[0][0]
    assert "rank 2 (host" in text
    assert "rank 0 (host" in text
    assert "share no memory" in text
    assert "gloo" in text
    assert max(seconds for _, seconds in texts) < 10


# ---------------------------------------------------------------- groups within


def sub_groups(rank: int, world: int) -> None:
    even = dist.new_group(list(range(0, world, 2)))
    odd = dist.new_group(list(range(1, world, 2)))
    single = [dist.new_group([r]) for r in range(world)]
    mine = odd if rank % 2 else even
    assert total(mine) == len(range(rank % 2, world, 2))
    threads = comm_threads()
    work = dist.all_reduce(torch.ones(2), group=single[rank], async_op=True)
    assert work.is_completed()
    assert comm_threads() == threads, "a group of one rank needs no thread"
    for group in (even, odd, *single):
        if dist.get_rank(group) >= 0:
            dist.destroy_process_group(group)
    assert total() == world


@pytest.mark.parametrize("world", [2, 4])
def test_new_group(rank_pool, world):
    rank_pool(world).run(sub_groups)


def reordered(rank: int, world: int) -> None:
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


def test_errors_tell_the_global_ranks_of_a_sub_group():
    run_ranks(3, reordered)


def splits(rank: int, world: int) -> None:
    halves = [list(range(world // 2)), list(range(world // 2, world))]
    group = dist.split_group(split_ranks=halves)
    assert group.size() == len(halves[rank // (world // 2)])
    assert total(group, float(rank)) == sum(halves[rank // (world // 2)])
    again = dist.split_group(split_ranks=[[world - 1, 0]])
    if rank in (0, world - 1):
        assert again.rank() == (0 if rank == world - 1 else 1)
        assert total(again) == 2
    else:
        assert again is None or again == dist.GroupMember.NON_GROUP_MEMBER
    # The parent's options are not the child's.
    assert backend_of().options._timeout == datetime.timedelta(seconds=60)
    assert total() == world


@pytest.mark.skipif(not HAS_SPLIT_WITHOUT_DEVICE, reason="torch splits groups without a device from 2.15 on")
def test_split_group():
    run_ranks(4, splits)


def backend_splits(rank: int, world: int) -> None:
    """The backend's own split and merge, which later versions of torch call from several places."""
    store = dist.PrefixStore("merged", dist.distributed_c10d._get_default_store())
    group = dist.group.WORLD.merge_remote_group(store, world, datetime.timedelta(seconds=20), "merged")
    tensor = torch.ones(1)
    group.allreduce([tensor]).wait()
    assert tensor.item() == world


def test_merge_remote_group():
    run_ranks(2, backend_splits)


def shrinks(rank: int, world: int) -> tuple[int, float]:
    if rank == 1:
        return -1, 0.0
    group = dist.shrink_group([1])
    tensor = torch.full((1,), float(rank))
    group.allreduce([tensor]).wait()
    return group.rank(), tensor.item()


@pytest.mark.skipif(not HAS_SPLIT_WITHOUT_DEVICE, reason="torch shrinks groups of any backend from 2.15 on")
def test_shrink_group():
    assert run_ranks(3, shrinks) == [(0, 2.0), (-1, 0.0), (1, 2.0)]


def meshes(rank: int, world: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("outer", "inner"))
    inner, outer = mesh.get_group("inner"), mesh.get_group("outer")
    assert backend_of(inner).name() == "ours"
    assert total(inner) == world // 2
    assert total(outer, float(rank)) == rank + (rank + world // 2) % world
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    whole = torch.arange(16.0).view(4, 4)
    sharded = distribute_tensor(whole, mesh, [Shard(0), Shard(1)])
    assert torch.equal(sharded.redistribute(mesh, [Replicate(), Replicate()]).to_local(), whole)
    assert isinstance(sharded, DTensor)


def test_device_mesh_and_dtensor():
    run_ranks(4, meshes)


def detailed(rank: int, world: int) -> str:
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
    return type(backend_of()).__name__


def test_detail_debug_mode():
    assert set(run_ranks(2, detailed, backend=None)) == {"_ProcessGroupWrapper"}


def lonely(rank: int, world: int) -> int:
    backend = backend_of()
    works = [dist.all_reduce(torch.ones(3), async_op=True) for _ in range(3)]
    assert all(work.is_completed() for work in works)
    with pytest.raises(ValueError, match="another rank"):
        backend.send([torch.ones(1)], 0, 0)
    backend.abort()
    assert backend.get_error().name == "COMM_ERROR"
    with pytest.raises(dist.DistBackendError, match="aborted"):
        dist.all_reduce(torch.ones(3))
    return comm_threads()


def test_a_world_of_one_needs_no_thread():
    assert run_ranks(1, lonely) == [0]


def closed(rank: int, world: int) -> None:
    group = dist.new_group()
    work = dist.all_reduce(torch.ones(300_000), group=group, async_op=True)
    backend = backend_of(group)
    dist.destroy_process_group(group)  # completes what is queued
    assert work.is_completed()
    assert work.is_success()
    with pytest.raises(RuntimeError, match="was shut down"):
        backend.barrier(dist.BarrierOptions())
    assert total() == world


def test_destroying_completes_what_is_queued(rank_pool):
    rank_pool(2).run(closed)


def many(rank: int, world: int) -> int:
    for _ in range(25):
        group = dist.new_group()
        dist.all_reduce(torch.ones(10), group=group, async_op=True).wait()
        dist.destroy_process_group(group)
    return len(os.listdir("/proc/self/fd"))


def test_groups_give_everything_back():
    with RankPool(2) as pool:
        first = pool.run(many)
        second = pool.run(many)
    assert max(b - a for a, b in zip(first, second, strict=True)) < 25, "file descriptors leak"
