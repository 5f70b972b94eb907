"""Tensors in memory that all_reduce works on without copies: c10d's allocator interface, and its users."""

from __future__ import annotations

import gc
import os
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from gradient_cases import WEIGHT_BYTES, backward, check_averages, make_model
from probes import HAS_HOOKS, backend_of, bytes_in_heap, in_heap
from ranks import in_ranks
from torch import nn

from ourddp import DistributedDataParallel

LARGE = 50_000  # elements: more than goes in one synchronisation


def _reduce(rank, world, dtype, count):
    backend = backend_of()
    assert backend.supports_tensor_alloc(torch.device("cpu"))
    tensor = backend.allocate_tensor(count, dtype=dtype, device=torch.device("cpu"))
    assert in_heap(tensor)
    assert tensor.shape == (count,)
    assert tensor.dtype == dtype
    generator = torch.Generator().manual_seed(rank)
    ordinary = torch.randint(0, 100, (count,), generator=generator).to(dtype)
    tensor.copy_(ordinary)
    for _ in range(2):
        dist.all_reduce(tensor)
        dist.all_reduce(ordinary)
        assert torch.equal(tensor, ordinary)
    # A part of the tensor, and an asynchronous call.
    work = dist.all_reduce(tensor[3:], async_op=True)
    dist.all_reduce(ordinary[3:])
    work.wait()
    assert torch.equal(tensor, ordinary)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_all_reduce_in_the_heap_equals_all_reduce(rank_pool, dtype):
    for world in (2, 4):
        rank_pool(world, "ours").run(_reduce, dtype, LARGE)
    rank_pool(3, "ours").run(_reduce, dtype, 7)


@in_ranks(3)
def test_only_some_ranks_may_have_their_tensor_in_the_heap(rank, world):
    tensor = backend_of().allocate_tensor(LARGE, dtype=torch.float32, device=torch.device("cpu"))
    tensor = tensor.fill_(rank + 1) if rank else torch.ones(LARGE)
    dist.all_reduce(tensor)
    assert torch.equal(tensor, torch.full_like(tensor, sum(range(1, world + 1))))


@in_ranks(2)
def test_tensors_outlive_their_group_and_release_their_memory(rank, world):
    group = dist.new_group(backend="ours")
    gc.collect()
    dist.barrier()
    before = bytes_in_heap()
    dist.barrier()
    tensor = backend_of(group).allocate_tensor(LARGE, dtype=torch.float32, device=torch.device("cpu"))
    assert bytes_in_heap() >= before + tensor.nbytes
    tensor.fill_(1)
    child = os.fork()
    if child == 0:
        # A child must neither release memory of its parent's heap nor allocate from it.
        del tensor
        gc.collect()
        more = backend_of(group).allocate_tensor(LARGE, dtype=torch.float32, device=torch.device("cpu"))
        os._exit(0 if not in_heap(more) else 1)
    assert os.waitpid(child, 0)[1] == 0
    tensor.resize_(2 * LARGE)
    assert in_heap(tensor)
    assert torch.equal(tensor[:LARGE], torch.ones(LARGE))
    dist.all_reduce(tensor, group=group)
    dist.barrier(group)
    dist.destroy_process_group(group)
    del group
    gc.collect()
    assert tensor[0] == world
    # Twice, since the second time the memory is no longer the heap's.
    for times in (4, 8):
        tensor.resize_(times * LARGE)
        assert tensor[0] == world
    del tensor
    gc.collect()
    dist.barrier()
    assert bytes_in_heap() == before


@pytest.mark.skipif(not HAS_HOOKS, reason="torch asks backends for their memory from 2.15 on")
@in_ranks(4, "played_nodes")
def test_a_group_tells_how_much_memory_it_has(rank, world):
    group = dist.new_group(backend="ours")
    backend = backend_of(group)
    dist.barrier(group)
    before = backend.memory_stats()
    assert set(before) == {"segment", "tensors"}
    assert before["segment"] > 0
    assert before["tensors"] == 0
    tensor = backend.allocate_tensor(LARGE, dtype=torch.float32, device=torch.device("cpu"))
    assert tensor.nbytes <= backend.memory_stats()["tensors"] <= tensor.nbytes + 4096
    del tensor
    gc.collect()
    assert backend.memory_stats()["tensors"] == 0
    dist.all_reduce(torch.ones(1 << 20), group=group)
    assert backend.memory_stats()["segment"] > before["segment"]
    dist.destroy_process_group(group)


@pytest.mark.skipif(not HAS_HOOKS, reason="torch asks backends for their memory from 2.15 on")
@in_ranks(4, "played_nodes")
def test_a_group_takes_memory_as_its_messages_need_it(rank, world):
    group = dist.new_group(backend="ours")

    def taken():
        dist.barrier(group)
        segment = backend_of(group).memory_stats()["segment"]
        dist.barrier(group)  # before others go on, and take more
        return segment

    first = taken()
    for count in (1, 1000):
        dist.all_reduce(torch.ones(count), group=group)
        dist.broadcast(torch.ones(count), 0, group=group)
        dist.all_gather([torch.ones(count) for _ in range(world)], torch.ones(count), group=group)
    assert taken() - first <= world * (64 << 10)
    dist.all_reduce(torch.ones(1 << 20), group=group)
    assert taken() - first >= 1 << 20
    dist.destroy_process_group(group)


@in_ranks(2)
def test_a_group_of_one_allocates_ordinary_memory(rank, world):
    groups = [dist.new_group([r], backend="ours") for r in range(world)]
    tensor = backend_of(groups[rank]).allocate_tensor(10, dtype=torch.float32, device=torch.device("cpu"))
    dist.all_reduce(tensor.fill_(3), group=groups[rank])
    assert tensor.tolist() == [3] * 10
    dist.destroy_process_group(groups[rank])
    del groups
    gc.collect()
    tensor.resize_(LARGE)
    assert tensor[:10].tolist() == [3] * 10


@pytest.mark.parametrize("cls", [DistributedDataParallel, nn.parallel.DistributedDataParallel])
@in_ranks(2)
def test_views_of_buckets_are_in_the_heap(rank, world, cls):
    with mock.patch.dict(os.environ, {"DDP_DISABLE_COMM_MEM": "0"}):  # torch's class asks for this
        model = cls(make_model(), bucket_cap_mb=0.1, gradient_as_bucket_view=True)
        for step in range(3):
            model.zero_grad(set_to_none=step != 1)
            backward(model, rank)
            check_averages(model, world)
            assert all(in_heap(parameter.grad) for parameter in model.parameters())
        assert cls is not DistributedDataParallel or model.reducer._get_status().reduced_in_place == 0


@in_ranks(2)
def test_buckets_for_hooks_are_in_the_heap(rank, world):
    gc.collect()
    dist.barrier()
    before = bytes_in_heap()
    dist.barrier()
    model = DistributedDataParallel(make_model(), bucket_cap_mb=0.1)
    model._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
    for step in range(3):
        model.zero_grad(set_to_none=step != 1)
        backward(model, rank)
        check_averages(model, world)
        assert not any(in_heap(parameter.grad) for parameter in model.parameters())
    dist.barrier()
    assert bytes_in_heap() - before >= 3 * WEIGHT_BYTES
    dist.barrier()
