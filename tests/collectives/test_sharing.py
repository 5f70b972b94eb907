"""Ordinary tensors that are made in memory that the ranks of a node share."""

from __future__ import annotations

import contextlib
import gc
import os
import threading

import pytest
import torch
import torch.distributed as dist
from probes import bytes_in_heap, in_heap
from ranks import in_ranks
from torch import nn

import ourddp

LARGE = 100_000  # elements


@in_ranks(2)
def test_tensors_of_the_context_are_shared_and_reduced_where_they_lie(rank, world):
    before = torch.ones(LARGE)
    with ourddp.shared_tensors():
        tensors = [torch.full((LARGE,), rank + 1.0), torch.empty(2, LARGE).fill_(rank), before.clone(), before + rank]
        short = torch.ones(100)
    after = torch.ones(LARGE)
    assert all(in_heap(tensor) for tensor in tensors)
    assert not any(in_heap(tensor) for tensor in (before, short, after))
    for tensor in tensors:
        expected = tensor.clone()
        dist.all_reduce(expected)
        for call in (lambda x: dist.all_reduce(x), lambda x: dist.all_reduce(x, async_op=True).wait()):
            result = tensor.clone()
            call(result)
            assert torch.equal(result, expected)


@in_ranks(2)
def test_a_model_and_its_gradients_can_be_shared(rank, world):
    with ourddp.shared_tensors():
        model = nn.Linear(512, 512)
    assert in_heap(model.weight)
    assert not in_heap(model.bias), "it is short"
    for parameter in model.parameters():
        dist.broadcast(parameter.data, 0)
    data = torch.full((4, 512), rank + 1.0)
    with ourddp.shared_tensors():
        model(data).sum().backward()
    assert in_heap(model.weight.grad)
    dist.all_reduce(model.weight.grad)
    assert torch.equal(model.weight.grad, torch.full_like(model.weight, 4 * 3.0))
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert in_heap(model.weight)


@in_ranks(2)
def test_layers_that_take_raw_memory_work_in_the_context(rank, world):
    torch.manual_seed(0)
    layers = [nn.Conv2d(64, 128, 3), nn.Linear(512, 512).bfloat16()]
    inputs = [torch.randn(2, 64, 32, 32), torch.randn(64, 512).bfloat16()]
    for layer, data in zip(layers, inputs, strict=True):
        results = []
        for context in (contextlib.nullcontext, lambda: ourddp.shared_tensors(least=0)):
            layer.zero_grad(set_to_none=True)
            with context():
                out = layer(data)
                out.sum().backward()
            results.append((out.clone(), layer.weight.grad.clone()))
        assert in_heap(layer.weight.grad)
        assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


@in_ranks(2)
def test_contexts_leave_the_gradients_of_our_ddp_in_their_memory(rank, world):
    def step():
        model.zero_grad(set_to_none=True)
        model(torch.ones(1, 512)).sum().backward()
        return model.module.weight.grad

    with ourddp.shared_tensors():
        module = nn.Linear(512, 512, bias=False)
    model = ourddp.DistributedDataParallel(module)
    places = {step().data_ptr() for _ in range(4)}
    with ourddp.shared_tensors():
        places |= {step().data_ptr() for _ in range(4)}
    places |= {step().data_ptr() for _ in range(4)}
    assert in_heap(step())
    assert len(places) <= 2, "its memory is used again"


@in_ranks(2)
def test_contexts_nest_and_end_with_an_error(rank, world):
    with ourddp.shared_tensors(), ourddp.shared_tensors(least=1 << 30):
        assert not in_heap(torch.ones(LARGE))
    with ourddp.shared_tensors(least=1 << 30):
        with ourddp.shared_tensors(least=0):
            assert in_heap(torch.ones(1))
        assert not in_heap(torch.ones(LARGE))
    with pytest.raises(ZeroDivisionError), ourddp.shared_tensors():
        raise ZeroDivisionError
    assert not in_heap(torch.ones(LARGE))


@in_ranks(2)
def test_other_threads_make_their_tensors_as_before(rank, world):
    made = []
    with ourddp.shared_tensors():
        thread = threading.Thread(target=lambda: made.append(torch.ones(LARGE)))
        thread.start()
        thread.join()
    assert not in_heap(made[0])
    with pytest.raises(RuntimeError, match="this thread shares no tensors"):
        ourddp._C.end_sharing_tensors()


@in_ranks(2)
def test_shared_tensors_can_be_resized_freed_and_forked(rank, world):
    gc.collect()
    dist.barrier()
    before = bytes_in_heap()
    dist.barrier()
    with ourddp.shared_tensors():
        tensor = torch.ones(LARGE)
        child = os.fork()
        if child == 0:
            more = torch.ones(LARGE)  # the parent would give the same memory to others
            tensor.fill_(7)
            os._exit(0 if not in_heap(more) and tensor.eq(7).all() else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert tensor.eq(1).all()
        assert in_heap(tensor.resize_(2 * LARGE))
    assert not in_heap(tensor.resize_(4 * LARGE))
    assert tensor[:LARGE].eq(1).all()
    del tensor
    dist.barrier()
    assert bytes_in_heap() == before
    dist.barrier()


@in_ranks(2)
def test_tensors_are_ordinary_once_their_group_is_gone(rank, world):
    group = dist.new_group(backend="ours")
    with ourddp.shared_tensors(group):
        tensor = torch.ones(LARGE)
        dist.barrier(group)
        dist.destroy_process_group(group)
        del group
        gc.collect()
        assert not in_heap(torch.ones(LARGE))
    assert in_heap(tensor)
    assert tensor.eq(1).all()


@in_ranks(2, nodes=2)
def test_ranks_that_have_a_node_each_get_ordinary_tensors(rank, world):
    with ourddp.shared_tensors():
        tensor = torch.ones(LARGE)
    assert not in_heap(tensor)
    dist.all_reduce(tensor)
    assert tensor.eq(world).all()


@in_ranks(2)
def test_what_cannot_be_shared_is_an_error(rank, world):
    gloo = dist.new_group(backend="gloo")
    with pytest.raises(ValueError, match="a process group of the backend ours"), ourddp.shared_tensors(gloo):
        pass
    with pytest.raises(ValueError, match="least=-1"), ourddp.shared_tensors(least=-1):
        pass


def test_there_has_to_be_a_group():
    with pytest.raises(ValueError, match="a process group of the backend ours"), ourddp.shared_tensors():
        pass
