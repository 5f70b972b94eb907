"""Gradients that are computed in the heap are right: of odd models, and of odd forwards and backwards."""

from __future__ import annotations

import copy
import resource
import threading

import pytest
import torch
import torch.distributed as dist
from gradient_cases import (
    WIDTH,
    backward,
    called_in_backward,
    check_averages,
    inputs_of,
    make_model,
    memory_returned,
    weights,
)
from probes import in_heap
from ranks import in_ranks
from torch import nn

from ourddp import DistributedDataParallel


@in_ranks(2)
def test_two_models_whose_backwards_are_one(rank, world):
    with memory_returned():
        first, second = DistributedDataParallel(make_model()), DistributedDataParallel(make_model())
        for _ in range(3):
            first.zero_grad()
            second.zero_grad()
            loss = second(first(inputs_of(rank))).square().mean() + first.module[0].weight.sum() * 0
            loss.backward()
            assert all(in_heap(weight.grad) for weight in weights(first) + weights(second))
        del first, second, loss


@in_ranks(2)
def test_backward_in_another_thread_than_forward(rank, world):
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


class Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(8, 128, 3)
        self.second = nn.Conv2d(128, 64, 3)

    def forward(self, x):
        return self.second(self.first(x)).mean((2, 3))


@in_ranks(2)
def test_gradients_of_convolutions_are_in_the_heap(rank, world):
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


class Odd(nn.Module):
    """A parameter without elements that is alone in its bucket, as the only one of its dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.empty = nn.Parameter(torch.empty(0, 5, dtype=torch.float64))

    def forward(self, x):
        return self.layer(x) + self.empty.sum()


@in_ranks(2)
def test_a_bucket_without_elements(rank, world):
    torch.manual_seed(0)
    model = DistributedDataParallel(Odd())
    for _ in range(3):
        model.zero_grad()
        backward(model, rank)
        check_averages(model, world)
        assert model.module.empty.grad.shape == (0, 5)


class Conjugate(nn.Module):
    """Autograd leaves the parameter's gradient conjugated lazily."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.p = nn.Parameter(torch.randn(size, dtype=torch.complex64))
        self.factor = torch.randn(size, dtype=torch.complex64)

    def forward(self, x):
        return (self.p.conj() * x.sum() * self.factor).real.sum()


@pytest.mark.parametrize("options", [{}, {"static_graph": True}], ids=["default", "static"])
@pytest.mark.parametrize("size", [100, 10_000, 100_000])
@in_ranks(2)
def test_gradients_that_are_conjugated_lazily(rank, world, size, options):
    torch.manual_seed(0)
    model = DistributedDataParallel(Conjugate(size), **options)
    for _ in range(3):
        model.zero_grad()
        backward(model, rank)
        check_averages(model, world)


@in_ranks(2)
def test_a_forward_in_the_midst_of_backward(rank, world):
    module = make_model()
    model = DistributedDataParallel(module)
    for step in range(3):
        model.zero_grad()
        handles = []

        def interrupt(step=step, handles=handles):
            if module[2].weight.grad is None:
                return
            # A hook in a module changes how gradients are reduced, from the next forward on.
            if step == 1:
                handles.append(module[0].register_full_backward_hook(lambda *unused: None))
            with torch.no_grad():
                model(inputs_of(7))

        with called_in_backward(interrupt):
            output = model(inputs_of(rank))
        output.square().mean().backward()
        assert model.reducer._get_status().reduced_in_place == 3
        for handle in handles:
            handle.remove()
        check_averages(model, world)


@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True}], ids=["default", "views"])
@in_ranks(2)
def test_a_static_graph_in_another_group(rank, world, options):
    model = DistributedDataParallel(make_model(), static_graph=True, **options)
    for _ in range(2):
        group = dist.new_group(backend="ours")
        model._update_process_group(group)
        for _ in range(3):
            model.zero_grad()
            backward(model, rank)
            check_averages(model, world)
        model._update_process_group(dist.group.WORLD)
        dist.destroy_process_group(group)
    for _ in range(2):
        model.zero_grad()
        backward(model, rank)
        check_averages(model, world)


class Stumbling(nn.Module):
    """Its backward fails in the first layer while ``fails`` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = make_model()
        self.fails = True

    def forward(self, x):
        hidden = self.layers[0](x)
        hidden.register_hook(self._stumble)
        return self.layers[2](self.layers[1](hidden))

    def _stumble(self, gradient):
        if self.fails:
            raise ArithmeticError("stumbles")


@in_ranks(2)
def test_a_static_graph_whose_first_backward_fails(rank, world):
    module = Stumbling()
    model = DistributedDataParallel(module, static_graph=True)
    with pytest.raises(ArithmeticError, match="stumbles"):
        backward(model, rank)
    module.fails = False
    for _ in range(4):
        model.zero_grad()
        backward(model, rank)
        for mine, expected in zip(module.parameters(), _alone(module.layers, world), strict=True):
            torch.testing.assert_close(mine.grad, expected, rtol=1e-4, atol=1e-6)


def _alone(layers: nn.Module, world: int) -> list[torch.Tensor]:
    """Return the gradients of one process that has seen all ranks' inputs."""
    alone = copy.deepcopy(layers)
    alone.zero_grad()
    for rank in range(world):
        (alone(inputs_of(rank)).square().mean() / world).backward()
    return [parameter.grad for parameter in alone.parameters()]
