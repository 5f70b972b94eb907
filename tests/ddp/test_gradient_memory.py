"""Which tensors get memory of the heap for gradients, how long they keep it, and when it returns."""

from __future__ import annotations

import gc
import os
import threading
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from ddp_cases import known
from gradient_cases import (
    WEIGHT_BYTES,
    WIDTH,
    backward,
    check_averages,
    inputs_of,
    make_model,
    memory_returned,
    weights,
)
from probes import bytes_in_heap, in_heap
from ranks import in_ranks

from ourddp import DistributedDataParallel


@pytest.mark.parametrize(
    "options",
    [{}, {"bucket_cap_mb": 0.1}, {"find_unused_parameters": True}, {"static_graph": True}],
    ids=["default", "buckets", "unused", "static"],
)
@in_ranks(2)
def test_gradients_are_computed_in_the_heap(rank, world, options):
    with memory_returned():
        model = DistributedDataParallel(make_model(), **options)
        before = bytes_in_heap()
        for _ in range(4):
            model.zero_grad()
            backward(model, rank)
            assert model.reducer._get_status().reduced_in_place == 3
            assert all(in_heap(weight.grad) for weight in weights(model))
            check_averages(model, world)
        dist.barrier()
        # Gradients once, in each rank, and the biases' part of a bucket, in whole pages.
        assert bytes_in_heap() - before <= world * (3 * WEIGHT_BYTES + 2 * 4096)
        dist.barrier()
        del model


@pytest.mark.parametrize("set_to_none", [True, False])
@in_ranks(2)
def test_accumulated_gradients_are_in_the_heap(rank, world, set_to_none):
    with memory_returned():
        model = DistributedDataParallel(make_model())
        for window in range(3):
            model.zero_grad(set_to_none=set_to_none)
            for step in range(3):
                with nullcontext() if step == 2 else model.no_sync():
                    (model(inputs_of(rank)).square().mean() / 3).backward()
            # A gradient that Python has seen and that stays cannot be told from one that somebody holds.
            assert model.reducer._get_status().reduced_in_place == 3 or (window and not set_to_none)
            assert all(in_heap(weight.grad) for weight in weights(model))
            check_averages(model, world)
        del model


@in_ranks(2)
def test_a_gradient_that_is_held_stays_as_it_is(rank, world):
    with memory_returned():
        model = DistributedDataParallel(make_model())
        kept = []
        for step in range(4):
            backward(model, rank)
            check_averages(model, world)
            kept.append([parameter.grad for parameter in model.parameters()])
            copies = [gradient.clone() for gradient in kept[0]]
            model.zero_grad()
            if step == 0:
                first = copies
            assert all(torch.equal(now, then) for now, then in zip(kept[0], first, strict=True))
        # Each backward had gradients of its own.
        assert len({gradient.data_ptr() for gradients in kept for gradient in gradients}) == 4 * 6
        del model, kept


@in_ranks(2)
def test_only_what_may_be_a_gradient_gets_the_memory(rank, world):
    with memory_returned():
        model = DistributedDataParallel(make_model())
        loss = model(inputs_of(rank)).square().mean()
        # Open: tensors of another thread, and in a child, have ordinary memory all the same.
        seen = []
        thread = threading.Thread(target=lambda: seen.append(in_heap(torch.empty(WIDTH, WIDTH))))
        thread.start()
        thread.join()
        assert seen == [False]
        child = os.fork()
        if child == 0:
            os._exit(1 if in_heap(torch.empty(WIDTH, WIDTH)) else 0)
        assert os.waitpid(child, 0)[1] == 0
        # Tensors of other sizes get none; those of this size get one more than there are gradients.
        assert not in_heap(torch.empty(WIDTH, WIDTH + 1))
        taken = [torch.empty(WIDTH, WIDTH) for _ in range(8)]
        assert sum(map(in_heap, taken)) == 4
        loss.backward()
        check_averages(model, world)
        assert not in_heap(torch.empty(WIDTH, WIDTH))
        # They are written over by nobody, and return.
        for value, tensor in enumerate(taken):
            tensor.fill_(value)
        model.zero_grad()
        backward(model, rank)
        assert all(torch.equal(tensor, torch.full((WIDTH, WIDTH), float(i))) for i, tensor in enumerate(taken))
        assert all(in_heap(weight.grad) for weight in weights(model))
        model.zero_grad()
        model(inputs_of(rank))
        del model
        assert not in_heap(torch.empty(WIDTH, WIDTH))
        del taken, loss, tensor


@in_ranks(2)
def test_the_profiler_sees_the_memory(rank, world):
    model = DistributedDataParallel(make_model(1))
    backward(model, rank)
    model.zero_grad()
    with torch.profiler.profile(profile_memory=True) as profile:
        backward(model, rank)
        model.zero_grad()
    usage = {event.key: event.self_cpu_memory_usage for event in profile.key_averages()}
    assert usage["aten::mm"] == WEIGHT_BYTES


@in_ranks(2)
def test_a_hook_makes_the_memory_return(rank, world):
    with memory_returned():
        model = DistributedDataParallel(make_model())
        backward(model, rank)
        model.zero_grad()
        model._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
        before = bytes_in_heap()
        dist.barrier()
        backward(model, rank)
        check_averages(model, world)
        model.zero_grad()
        dist.barrier()
        # The buckets are whole now, and what was kept for gradients is not kept any more.
        assert bytes_in_heap() - before <= world * 4096 * 7
        dist.barrier()
        del model


@in_ranks(2)
def test_gradients_move_to_the_heap_of_another_group(rank, world):
    with memory_returned():
        model = DistributedDataParallel(make_model())
        for _ in range(2):
            group = dist.new_group(backend="ours")
            model._update_process_group(group)
            for _ in range(2):
                model.zero_grad()
                backward(model, rank)
                check_averages(model, world)
                assert all(in_heap(weight.grad) for weight in weights(model))
                assert model.reducer._get_status().reduced_in_place == 3
            model._update_process_group(dist.group.WORLD)
            dist.destroy_process_group(group)
        del model


@in_ranks(2)
def test_what_a_forked_child_writes_stays_its_own(rank, world):
    model = DistributedDataParallel(make_model())
    backward(model, rank)
    before = [parameter.grad.clone() for parameter in model.parameters()]
    child = os.fork()
    if child == 0:
        for parameter in model.parameters():
            parameter.grad.zero_()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert all(torch.equal(p.grad, then) for p, then in zip(model.parameters(), before, strict=True))


@pytest.mark.parametrize("option", ["process_group", "lazy_bucket_allocation"])
@in_ranks(2)
def test_other_backends_and_buckets_that_are_dropped_leave_gradients_in_ordinary_memory(rank, world, option):
    options = {option: dist.new_group(backend="gloo") if option == "process_group" else True}
    gc.collect()
    dist.barrier()
    before = bytes_in_heap()
    dist.barrier()
    model = DistributedDataParallel(make_model(), **known(options))
    for _ in range(2):
        model.zero_grad()
        backward(model, rank)
        check_averages(model, world)
        assert not any(in_heap(weight.grad) for weight in weights(model))
        assert model.reducer._get_status().reduced_in_place == (0 if option == "process_group" else 3)
    dist.barrier()
    assert bytes_in_heap() - before <= world * 4096
    dist.barrier()


@pytest.mark.parametrize(("cap", "spare"), [(25, True), (0.05, False)])
@in_ranks(2)
def test_what_is_added_to_a_gradient_gets_memory_only_where_it_is_kept(rank, world, cap, spare):
    with memory_returned():
        model = DistributedDataParallel(make_model(1), bucket_cap_mb=cap)
        (weight,) = weights(model)
        incoming = []
        handle = weight.register_hook(lambda gradient: incoming.append(in_heap(gradient)))
        for step in range(3):
            with nullcontext() if step == 2 else model.no_sync():
                (model(inputs_of(rank)).square().mean() / 3).backward()
        assert incoming == [True, spare, spare]
        assert in_heap(weight.grad)
        check_averages(model, world)
        handle.remove()
        del model, weight, handle
