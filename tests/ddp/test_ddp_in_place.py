"""Gradients that are reduced where they lie, without a bucket: what they are then, and where they are left alone."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist
from gradient_cases import WIDTH, backward, called_in_backward, check_averages, inputs_of, make_model, weights
from ranks import in_ranks
from torch import nn

from ourddp import DistributedDataParallel

WEIGHTS = 3  # of make_model()


def in_place(model: DistributedDataParallel) -> int:
    return model.reducer._get_status().reduced_in_place


@in_ranks(2, fresh=True)
def test_a_change_during_the_reduction_is_an_error(rank, world):
    """Autograd does not know what unpacks saved tensors, such as the second forward of a checkpoint."""
    model = DistributedDataParallel(make_model(), bucket_cap_mb=0.1)

    def double():
        gradient = model.module[2].weight.grad
        if gradient is not None:
            gradient.mul_(2)

    with called_in_backward(double):
        output = model(inputs_of(rank))
    with pytest.raises(RuntimeError, match=r"2.weight.* was changed during backward"):
        output.square().sum().backward()


@in_ranks(2)
def test_gradients_that_somebody_holds_are_left_alone_until_the_end(rank, world):
    model = DistributedDataParallel(make_model())
    held, other, _ = weights(model)
    held.grad = torch.zeros_like(held)
    same = held.grad
    other.grad = torch.zeros(WIDTH, WIDTH)
    alias = other.grad.view(-1)
    backward(model, rank)
    check_averages(model, world)
    assert same is held.grad
    assert alias.data_ptr() == other.grad.data_ptr()
    assert in_place(model) == WEIGHTS - 2


@pytest.mark.parametrize("order", ["this first", "other first"])
@in_ranks(2)
def test_a_parameter_that_two_models_share_is_left_alone(rank, world, order):
    shared = nn.Linear(WIDTH, WIDTH)
    modules = [nn.Sequential(nn.Linear(WIDTH, WIDTH), shared, nn.Linear(WIDTH, 4)), nn.Sequential(shared)]
    if order == "other first":
        modules.reverse()
    models = [DistributedDataParallel(module) for module in modules]
    for _ in range(2):  # the buckets are built anew before the second backward
        gradients = []
        for other in range(world):
            loss = sum(module(inputs_of(other)).square().mean() for module in modules)
            gradients.append(torch.autograd.grad(loss, list(shared.parameters())))
        shared.zero_grad()
        sum(model(inputs_of(rank)).square().mean() for model in models).backward()
        for parameter, *own in zip(shared.parameters(), *gradients, strict=True):
            torch.testing.assert_close(parameter.grad, sum(own) / world)
    assert [in_place(model) for model in models] == [0, 0]


class Tied(nn.Module):
    """Two parameters whose gradients autograd puts into the same memory."""

    def __init__(self) -> None:
        super().__init__()
        self.square = nn.Parameter(torch.ones(WIDTH, WIDTH))
        self.flat = nn.Parameter(torch.ones(WIDTH * WIDTH))

    def forward(self, x):
        return (self.square + self.flat.view(WIDTH, WIDTH)) * x


@in_ranks(3)
def test_gradients_in_shared_memory_are_averaged_once(rank, world):
    model = DistributedDataParallel(Tied())
    x = torch.arange(WIDTH * WIDTH, dtype=torch.float32).view(WIDTH, WIDTH) * (rank + 1)
    model(x).sum().backward()
    expected = x / (rank + 1) * sum(range(1, world + 1)) / world
    torch.testing.assert_close(model.module.square.grad, expected)
    torch.testing.assert_close(model.module.flat.grad, expected.view(-1))


@in_ranks(2)
def test_buckets_are_whole_where_c10d_compares_them(rank, world):
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    try:
        model = DistributedDataParallel(make_model(), process_group=dist.new_group(backend="ours"))
        if rank == 1:
            # Another way than rank 0's, were both reduced in place.
            model.module[0].weight.register_post_accumulate_grad_hook(lambda p: None)
        backward(model, rank)
        check_averages(model, world)
        assert in_place(model) == 0
    finally:
        dist.set_debug_level(dist.DebugLevel.OFF)


class Some(nn.Module):
    """Uses as many of its layers as it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = make_model()

    def forward(self, x, count):
        return self.layers[:count](x)


@in_ranks(2)
def test_unused_parameters_keep_their_gradients(rank, world):
    model = DistributedDataParallel(Some(), find_unused_parameters=True)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 7.0)
    model(inputs_of(rank), 2 - rank).square().sum().backward()
    alone = Some()
    for other in range(world):
        (alone(inputs_of(other), 2 - other).square().sum() / world).backward()
    mine, expected = weights(model), weights(alone)
    for index in (0, 1):
        torch.testing.assert_close(mine[index].grad, expected[index].grad + 7, rtol=1e-4, atol=1e-5)
    # Nobody used it: what it had stays, to the bit.
    assert torch.equal(mine[2].grad, torch.full_like(mine[2], 7.0))


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
@in_ranks(2)
def test_gradients_with_a_graph_of_their_own_are_left_alone(rank, world):
    model = DistributedDataParallel(make_model())
    model(inputs_of(rank)).square().mean().backward(create_graph=True)
    for parameter in model.parameters():
        parameter.grad.detach_()
    check_averages(model, world)
    assert in_place(model) == 0


@in_ranks(3)
def test_ranks_without_input_take_part(rank, world):
    model = DistributedDataParallel(make_model())
    with model.join():
        for _ in range(1 + rank):
            model.zero_grad()
            backward(model, rank)
    if rank == world - 1:  # which was alone in the last step
        alone = make_model()
        (alone(inputs_of(rank)).square().mean() / world).backward()
        for mine, expected in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, expected.grad, rtol=1e-4, atol=1e-6)


@in_ranks(2)
def test_a_gradient_replaced_during_backward_gets_the_average_all_the_same(rank, world):
    model = DistributedDataParallel(make_model())
    weight = model.module[2].weight

    def replace():
        # Some optimizers and clipping libraries do so while the reduction is under way.
        if weight.grad is not None:
            weight.grad = torch.full((WIDTH, WIDTH), -1.0)

    with called_in_backward(replace):
        output = model(inputs_of(rank))
    output.square().mean().backward()
    assert in_place(model) == WEIGHTS
    check_averages(model, world)


@in_ranks(3)
def test_a_list_of_tensors_is_one_message(rank, world):
    # Rank 0 cuts the ten elements in other places than the others.
    cuts = [0, 3, 3, 10] if rank == 0 else [0, 7, 9, 10]
    whole = torch.arange(10, dtype=torch.float32) * (rank + 1)
    pieces = [whole[a:b] for a, b in itertools.pairwise(cuts)]
    options = dist.AllreduceCoalescedOptions()
    options.reduceOp = dist.ReduceOp.AVG
    if rank == 2:  # in one piece
        dist.all_reduce(whole, dist.ReduceOp.AVG)
    else:
        dist.group.WORLD.allreduce_coalesced(pieces, options).wait()
    assert torch.equal(whole, torch.arange(10, dtype=torch.float32) * (sum(range(1, world + 1)) / world))
    with pytest.raises(ValueError, match="empty"):
        dist.group.WORLD._get_backend(torch.device("cpu")).allreduce_coalesced([])
