"""Gradients that are reduced where they lie, without a bucket: where that happens, and that nobody can tell."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist
from ddp_cases import bitwise_equal_everywhere
from gradient_cases import called_in_backward
from ranks import RanksFailedError, in_ranks
from torch import nn

from ourddp import DistributedDataParallel

WIDTH = 128  # a weight of 64 KiB: worth a piece of its own; biases are not
WEIGHTS = 3


class Wide(nn.Module):
    """Three weights that are large enough to be reduced in place, and as many biases that are not."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(WEIGHTS))

    def forward(self, x, layers=range(WEIGHTS)):
        for index in layers:
            x = torch.tanh(self.layers[index](x))
        return x


def wide(seed: int = 5) -> Wide:
    torch.manual_seed(seed)
    return Wide()


def batch(rank: int, step: int = 0) -> torch.Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank))


def average(world: int, step: int = 0, layers=range(WEIGHTS), model: Wide | None = None) -> dict[str, torch.Tensor]:
    """Return the gradients of one process that adds up all ranks' losses and divides by their number."""
    model = model or wide()
    for rank in range(world):
        (model(batch(rank, step), layers).square().sum() / world).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def assert_gradients(model: DistributedDataParallel, expected: dict[str, torch.Tensor]) -> None:
    found = {name: p.grad for name, p in model.module.named_parameters() if p.grad is not None}
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-5)


def in_place(model: DistributedDataParallel) -> int:
    return model.reducer._get_reduced_in_place()


def _train(rank, world, options, set_to_none):
    model = DistributedDataParallel(wide(), bucket_cap_mb=0.1, **options)
    alone = wide()
    counts = []
    for step in range(3):
        model.zero_grad(set_to_none=set_to_none)
        alone.zero_grad()
        model(batch(rank, step)).square().sum().backward()
        assert_gradients(model, average(world, step, model=alone))
        counts.append(in_place(model))
    return counts


@pytest.mark.parametrize(
    "options",
    [{}, {"find_unused_parameters": True}, {"static_graph": True}, {"lazy_bucket_allocation": True}],
    ids=lambda options: next(iter(options), "plain"),
)
@pytest.mark.parametrize("set_to_none", [True, False])
def test_large_gradients_are_reduced_in_place(rank_pool, options, set_to_none):
    if "lazy_bucket_allocation" in options and not hasattr(nn.parallel.DistributedDataParallel, "finalize_backward"):
        pytest.skip("this torch has no lazy_bucket_allocation")
    for counts in rank_pool(3, "ours").run(_train, options, set_to_none):
        # A gradient that Python has seen and that stays cannot be told from one that somebody holds.
        assert counts == [WEIGHTS] * 3 if set_to_none else counts[0] == WEIGHTS


def test_other_backends_and_views_use_buckets(rank_pool):
    assert rank_pool(2, "gloo").run(_train, {}, True) == [[0, 0, 0]] * 2
    assert rank_pool(2, "ours").run(_train, {"gradient_as_bucket_view": True}, True) == [[0, 0, 0]] * 2


def _clamped_by_modules(rank, world):
    model = DistributedDataParallel(wide(), bucket_cap_mb=0.1)

    def clamp(*_):
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.clamp_(-1, 1)

    for layer in model.module.layers:
        layer.register_full_backward_hook(clamp)
    for step in range(3):
        model.zero_grad()
        model(batch(rank, step)).square().sum().backward()
        for parameter in model.parameters():
            assert bitwise_equal_everywhere(parameter.grad)
    return in_place(model)


def test_modules_with_hooks_have_their_gradients_left_alone(rank_pool):
    assert rank_pool(2, "ours").run(_clamped_by_modules) == [0] * 2


def _meddles(rank, world):
    """Autograd does not know what unpacks saved tensors, such as the second forward of a checkpoint."""
    model = DistributedDataParallel(wide(), bucket_cap_mb=0.1)

    def double():
        gradient = model.module.layers[2].weight.grad
        if gradient is not None:
            gradient.mul_(2)

    with called_in_backward(double):
        output = model(batch(rank))
    output.square().sum().backward()


def test_a_change_during_the_reduction_is_an_error(rank_pool):
    with pytest.raises(RanksFailedError, match=r"layers.2.weight.* was changed during backward"):
        rank_pool(2, "ours").run(_meddles)


def _held(rank, world):
    model = DistributedDataParallel(wide())
    weight = model.module.layers[0].weight
    weight.grad = torch.zeros_like(weight)
    held = weight.grad
    alias = model.module.layers[1].weight.grad = torch.zeros(WIDTH, WIDTH)
    alias = alias.view(-1)
    model(batch(rank)).square().sum().backward()
    assert_gradients(model, average(world))
    assert held is weight.grad
    assert alias.data_ptr() == model.module.layers[1].weight.grad.data_ptr()
    return in_place(model)


def test_gradients_that_somebody_holds_are_left_alone_until_the_end(rank_pool):
    assert rank_pool(2, "ours").run(_held) == [WEIGHTS - 2] * 2


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


def _detail(rank, world):
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    try:
        group = dist.new_group(backend="ours")
        model = DistributedDataParallel(wide(), process_group=group)
        if rank == 1:
            # Another way than rank 0's, were both reduced in place.
            model.module.layers[0].weight.register_post_accumulate_grad_hook(lambda p: None)
        model(batch(rank)).square().sum().backward()
        assert_gradients(model, average(world))
        return in_place(model)
    finally:
        dist.set_debug_level(dist.DebugLevel.OFF)


def test_buckets_are_whole_where_c10d_compares_them(rank_pool):
    assert rank_pool(2, "ours").run(_detail) == [0] * 2


@in_ranks(2)
def test_unused_parameters_keep_their_gradients(rank, world):
    model = DistributedDataParallel(wide(), find_unused_parameters=True)
    layers = [0, 1] if rank == 0 else [0]
    for parameter in model.module.parameters():
        parameter.grad = torch.full_like(parameter, 7.0)
    model(batch(rank), layers).square().sum().backward()
    weights = [layer.weight.grad for layer in model.module.layers]
    alone = wide()
    for other in range(world):
        (alone(batch(other), [0, 1] if other == 0 else [0]).square().sum() / world).backward()
    for index in (0, 1):
        torch.testing.assert_close(weights[index], alone.layers[index].weight.grad + 7, rtol=1e-4, atol=1e-5)
    # Nobody used it: what it had stays, to the bit.
    assert torch.equal(weights[2], torch.full_like(weights[2], 7.0))


def _accumulate(rank, world):
    model = DistributedDataParallel(wide())
    with model.no_sync():
        model(batch(rank, 0)).square().sum().backward()
    model(batch(rank, 1)).square().sum().backward()
    alone = wide()
    average(world, 0, model=alone)
    assert_gradients(model, average(world, 1, model=alone))
    return in_place(model)


def test_accumulated_gradients_are_reduced_in_place(rank_pool):
    assert rank_pool(2, "ours").run(_accumulate) == [WEIGHTS] * 2


def _second_derivative(rank, world):
    model = DistributedDataParallel(wide())
    loss = model(batch(rank)).square().sum()
    loss.backward(create_graph=True)
    assert_gradients(model, {name: gradient.detach() for name, gradient in average(world).items()})
    return in_place(model)


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
def test_gradients_with_a_graph_of_their_own_are_left_alone(rank_pool):
    assert rank_pool(2, "ours").run(_second_derivative) == [0] * 2


@in_ranks(3)
def test_ranks_without_input_take_part(rank, world):
    model = DistributedDataParallel(wide())
    steps = 1 + rank
    with model.join():
        for step in range(steps):
            model.zero_grad()
            model(batch(rank, step)).square().sum().backward()
    alone = wide()
    if rank == world - 1:
        for other in range(world - 1, world):
            (alone(batch(other, steps - 1)).square().sum() / world).backward()
        assert_gradients(model, {name: p.grad for name, p in alone.named_parameters()})


@in_ranks(2)
def test_a_gradient_replaced_during_backward_gets_the_average_all_the_same(rank, world):
    model = DistributedDataParallel(wide())
    weight = model.module.layers[2].weight

    def replace():
        # Some optimizers and clipping libraries do so while the reduction is under way.
        if weight.grad is not None:
            weight.grad = torch.full((WIDTH, WIDTH), -1.0)

    with called_in_backward(replace):
        output = model(batch(rank))
    output.square().sum().backward()
    assert in_place(model) == WEIGHTS
    assert_gradients(model, average(world))


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
