"""Where gradients lie: autograd computes them in the heap, so that nothing is copied, and nobody can tell otherwise."""

from __future__ import annotations

import copy
import gc
import os
import resource
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import pytest
import torch
import torch.distributed as dist
from probes import bytes_in_heap, in_heap
from torch import nn

from ourddp import DistributedDataParallel

WIDTH = 128  # a weight's gradient has 64 KiB: large enough to be reduced where it lies
WEIGHT_BYTES = WIDTH * WIDTH * 4


def make_model(depth: int = 3) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(depth)))


def inputs_of(rank: int) -> torch.Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(rank))


def weights(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.ndim > 1]


def backward(model: nn.Module, rank: int) -> None:
    model(inputs_of(rank)).square().mean().backward()


def check_averages(model: DistributedDataParallel, world: int) -> None:
    """Compare the gradients with those of one process that has seen all ranks' inputs."""
    alone = copy.deepcopy(model.module)
    alone.zero_grad()
    for rank in range(world):
        (alone(inputs_of(rank)).square().mean() / world).backward()
    for mine, expected in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, expected.grad, rtol=1e-4, atol=1e-6)


@contextmanager
def memory_returned() -> Iterator[None]:
    """Fail unless all memory that the ranks take from the heap inside is returned."""
    gc.collect()
    dist.barrier()
    before = bytes_in_heap()
    dist.barrier()
    yield
    gc.collect()
    dist.barrier()
    assert bytes_in_heap() == before
    dist.barrier()


def _plain_steps(rank, world, options):
    with memory_returned():
        model = DistributedDataParallel(make_model(), **options)
        before = bytes_in_heap()
        for _ in range(4):
            model.zero_grad()
            backward(model, rank)
            assert all(in_heap(weight.grad) for weight in weights(model))
            check_averages(model, world)
        dist.barrier()
        # Gradients once, in each rank, and the biases' part of a bucket, in whole pages.
        assert bytes_in_heap() - before <= world * (3 * WEIGHT_BYTES + 2 * 4096)
        dist.barrier()
        del model


@pytest.mark.parametrize(
    "options",
    [{}, {"bucket_cap_mb": 0.1}, {"find_unused_parameters": True}, {"static_graph": True}],
    ids=["default", "buckets", "unused", "static"],
)
def test_gradients_are_computed_in_the_heap(rank_pool, options):
    rank_pool(2, "ours").run(_plain_steps, options)


def _accumulate(rank, world, set_to_none):
    with memory_returned():
        model = DistributedDataParallel(make_model())
        for _ in range(3):
            model.zero_grad(set_to_none=set_to_none)
            for step in range(3):
                with nullcontext() if step == 2 else model.no_sync():
                    (model(inputs_of(rank)).square().mean() / 3).backward()
            assert all(in_heap(weight.grad) for weight in weights(model))
            check_averages(model, world)
        del model


@pytest.mark.parametrize("set_to_none", [True, False])
def test_accumulated_gradients_are_in_the_heap(rank_pool, set_to_none):
    rank_pool(2, "ours").run(_accumulate, set_to_none)


def _held(rank, world):
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


def test_a_gradient_that_is_held_stays_as_it_is(rank_pool):
    rank_pool(2, "ours").run(_held)


def _two_models(rank, world):
    with memory_returned():
        first, second = DistributedDataParallel(make_model()), DistributedDataParallel(make_model())
        for _ in range(3):
            first.zero_grad()
            second.zero_grad()
            loss = second(first(inputs_of(rank))).square().mean() + first.module[0].weight.sum() * 0
            loss.backward()
            assert all(in_heap(weight.grad) for weight in weights(first) + weights(second))
        del first, second, loss


def test_two_models_whose_backwards_are_one(rank_pool):
    rank_pool(2, "ours").run(_two_models)


def _elsewhere(rank, world):
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
        # Of other sizes as well; of this size no more than there are gradients, and one.
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


def test_only_what_may_be_a_gradient_gets_the_memory(rank_pool):
    rank_pool(2, "ours").run(_elsewhere)


def _threads(rank, world):
    with memory_returned():
        model = DistributedDataParallel(make_model())
        for _ in range(3):
            model.zero_grad()
            loss = model(inputs_of(rank)).square().mean()
            thread = threading.Thread(target=loss.backward)
            thread.start()
            thread.join()
            check_averages(model, world)
        del model, loss, thread


def test_backward_in_another_thread_than_forward(rank_pool):
    rank_pool(2, "ours").run(_threads)


class Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(8, 128, 3)
        self.second = nn.Conv2d(128, 64, 3)

    def forward(self, x):
        return self.second(self.first(x)).mean((2, 3))


def _convolutions(rank, world):
    # oneDNN takes its memory by the allocator's raw interface.
    with memory_returned():
        torch.manual_seed(0)
        model = DistributedDataParallel(Convolution())
        alone = copy.deepcopy(model.module)
        images = [torch.randn(2, 8, 8, 8, generator=torch.Generator().manual_seed(r)) for r in range(world)]
        for _ in range(3):
            model.zero_grad()
            alone.zero_grad()
            model(images[rank]).square().mean().backward()
            for image in images:
                (alone(image).square().mean() / world).backward()
            for mine, expected in zip(model.parameters(), alone.parameters(), strict=True):
                torch.testing.assert_close(mine.grad, expected.grad, rtol=1e-4, atol=1e-6)
            assert in_heap(model.module.second.weight.grad)
        # The pages are the same from step to step, though the convolution takes more memory of that size for itself.
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        model.zero_grad()
        model(images[rank]).square().mean().backward()
        assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults < 20
        del model


def test_gradients_of_convolutions_are_in_the_heap(rank_pool):
    rank_pool(2, "ours").run(_convolutions)


def _profiled(rank, world):
    model = DistributedDataParallel(make_model(1))
    backward(model, rank)
    model.zero_grad()
    with torch.profiler.profile(profile_memory=True) as profile:
        backward(model, rank)
        model.zero_grad()
    usage = {event.key: event.self_cpu_memory_usage for event in profile.key_averages()}
    assert usage["aten::mm"] == WEIGHT_BYTES


def test_the_profiler_sees_the_memory(rank_pool):
    rank_pool(2, "ours").run(_profiled)


class Odd(nn.Module):
    """A parameter without elements that is alone in its bucket, as the only one of its dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.empty = nn.Parameter(torch.empty(0, 5, dtype=torch.float64))

    def forward(self, x):
        return self.layer(x) + self.empty.sum()


def _without_elements(rank, world):
    torch.manual_seed(0)
    model = DistributedDataParallel(Odd())
    for _ in range(3):
        model.zero_grad()
        backward(model, rank)
        check_averages(model, world)
        assert model.module.empty.grad.shape == (0, 5)


def test_a_bucket_without_elements(rank_pool):
    rank_pool(2, "ours").run(_without_elements)


class Conjugate(nn.Module):
    """Autograd leaves the parameter's gradient conjugated lazily."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.p = nn.Parameter(torch.randn(size, dtype=torch.complex64))
        self.factor = torch.randn(size, dtype=torch.complex64)

    def forward(self, x):
        return (self.p.conj() * x.sum() * self.factor).real.sum()


def _conjugate(rank, world, size, options):
    torch.manual_seed(0)
    model = DistributedDataParallel(Conjugate(size), **options)
    for _ in range(3):
        model.zero_grad()
        backward(model, rank)
        check_averages(model, world)


@pytest.mark.parametrize("options", [{}, {"static_graph": True}], ids=["default", "static"])
@pytest.mark.parametrize("size", [100, 10_000, 100_000])
def test_gradients_that_are_conjugated_lazily(rank_pool, size, options):
    rank_pool(2, "ours").run(_conjugate, size, options)


def _forward_in_backward(rank, world):
    module = make_model()
    model = DistributedDataParallel(module)
    for step in range(3):
        model.zero_grad()
        hidden = model.module[0](inputs_of(rank))
        del hidden
        handle = None
        output = model(inputs_of(rank))

        def interrupt(gradient, step=step):
            # A hook in a module changes how gradients are reduced; another forward takes note of it.
            nonlocal handle
            if step == 1:
                handle = module[0].register_full_backward_hook(lambda *unused: None)
            with torch.no_grad():
                model(inputs_of(7))

        module[1].weight.register_hook(interrupt)
        output.square().mean().backward()
        if handle is not None:
            handle.remove()
        check_averages(model, world)


def test_a_forward_in_the_midst_of_backward(rank_pool):
    rank_pool(2, "ours").run(_forward_in_backward)


def _hook_later(rank, world):
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


def test_a_hook_makes_the_memory_return(rank_pool):
    rank_pool(2, "ours").run(_hook_later)


def _new_group(rank, world):
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
                assert model.reducer._get_reduced_in_place() == 3
            model._update_process_group(dist.group.WORLD)
            dist.destroy_process_group(group)
        del model


def test_gradients_move_to_the_heap_of_another_group(rank_pool):
    rank_pool(2, "ours").run(_new_group)


def _fork(rank, world):
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


def test_what_a_forked_child_writes_stays_its_own(rank_pool):
    rank_pool(2, "ours").run(_fork)


def _ordinary(rank, world, options):
    gc.collect()
    dist.barrier()
    before = bytes_in_heap()
    dist.barrier()
    model = DistributedDataParallel(make_model(), **options)
    for _ in range(2):
        model.zero_grad()
        backward(model, rank)
        check_averages(model, world)
        assert not any(in_heap(weight.grad) for weight in weights(model))
    dist.barrier()
    assert bytes_in_heap() - before <= world * 4096
    dist.barrier()


def test_buckets_that_are_dropped_after_backward_leave_gradients_in_ordinary_memory(rank_pool):
    if "lazy_bucket_allocation" not in DistributedDataParallel.__init__.__wrapped__.__code__.co_varnames:
        pytest.skip("this torch has no lazy_bucket_allocation")
    rank_pool(2, "ours").run(_ordinary, {"lazy_bucket_allocation": True})


def _over_gloo(rank, world):
    gloo = dist.new_group(backend="gloo")
    _ordinary(rank, world, {"process_group": gloo})
    dist.destroy_process_group(gloo)


def test_other_backends_leave_gradients_in_ordinary_memory(rank_pool):
    rank_pool(2, "ours").run(_over_gloo)
