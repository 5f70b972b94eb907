"""SyncBatchNorm on the CPU: ranks with a part of the batch each compute what one process does with all of it."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ddp_cases import bitwise_equal_everywhere
from ranks import in_ranks
from torch import nn

import ourddp

CHANNELS = 3
NORMS = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}
SHAPES = {2: (), 3: (5,), 4: (4, 5), 5: (2, 3, 4)}
#  float32 differs from one process by the order of sums; what is narrower is computed in float32 and rounded once.
TOLERANCES = {torch.float64: 1e-10, torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def make_norm(dims: int, dtype: torch.dtype, options: dict[str, Any]) -> nn.Module:
    torch.manual_seed(5)
    layer = NORMS[dims](CHANNELS, **options)
    if layer.weight is not None:
        nn.init.uniform_(layer.weight, 0.5, 2)
        nn.init.uniform_(layer.bias)
    return layer.to(dtype)


def compare(
    rank: int,
    world: int,
    sizes: list[int],
    dims: int = 4,
    dtype: torch.dtype = torch.float32,
    options: dict[str, Any] | None = None,
    offset: float = 0.0,
    channels_last: bool = False,
    parameter_dtype: torch.dtype | None = None,
) -> None:
    """Train a layer for three steps on rank's part of each batch, and one in this process on all of it."""
    # Results of low precision are compared with the same numbers computed in float32.
    wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    norm = make_norm(dims, parameter_dtype or dtype, options or {})
    layer = ourddp.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(norm))
    reference = norm.to(wide)
    start = sum(sizes[:rank])
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        whole, slope = (
            torch.randn(sum(sizes), CHANNELS, *SHAPES[dims], generator=generator, dtype=torch.float64).to(dtype)
            for _ in range(2)
        )
        whole = whole + offset
        if channels_last:
            whole = whole.contiguous(memory_format=torch.channels_last)
        whole, slope = whole.to(wide).requires_grad_(), slope.to(wide)
        mine = whole.detach()[start : start + sizes[rank]].to(dtype).requires_grad_()
        expected = reference(whole)
        (expected * slope).sum().backward()
        actual = layer(mine)
        assert actual.dtype == dtype
        assert actual.shape == mine.shape
        (actual * slope[start : start + sizes[rank]].to(dtype)).sum().backward()
        close = {"rtol": TOLERANCES[dtype], "atol": TOLERANCES[dtype] * (1 + offset**2 / 100)}
        torch.testing.assert_close(actual.to(wide), expected[start : start + sizes[rank]], **close)
        torch.testing.assert_close(mine.grad.to(wide), whole.grad[start : start + sizes[rank]], **close)
    for (name, mine), theirs in zip(layer.named_parameters(), reference.parameters(), strict=True):
        assert mine.grad.dtype == mine.dtype, name
        total = mine.grad.to(wide)
        dist.all_reduce(total)
        torch.testing.assert_close(total, theirs.grad, rtol=10 * close["rtol"], atol=50 * close["atol"])
    assert list(layer.state_dict()) == list(reference.state_dict())
    for (name, mine), theirs in zip(layer.named_buffers(), reference.buffers(), strict=True):
        torch.testing.assert_close(mine.to(theirs.dtype), theirs, **close, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("dims", NORMS)
def test_all_shapes(rank_pool, backend, dims):
    rank_pool(2, backend).run(compare, [4, 4], dims)


@pytest.mark.parametrize("sizes", [[4, 1, 2], [3, 0, 2], [0, 0, 5], [1, 1, 1]])
def test_uneven_and_empty_batches(rank_pool, backend, sizes):
    rank_pool(3, backend).run(compare, sizes)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_all_dtypes(rank_pool, dtype):
    rank_pool(2).run(compare, [5, 3], 4, dtype)
    rank_pool(2).run(compare, [8, 4], 2, dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_narrow_inputs_and_wide_parameters(rank_pool, dtype):
    rank_pool(2).run(compare, [5, 3], 4, dtype, {}, 0.0, False, torch.float32)


@pytest.mark.parametrize(
    "options",
    [
        {"affine": False},
        {"track_running_stats": False},
        {"momentum": None},
        {"momentum": 0.7, "eps": 0.1},
        {"affine": False, "track_running_stats": False},
    ],
    ids=str,
)
def test_all_options(rank_pool, options):
    rank_pool(2).run(compare, [4, 2], 4, torch.float64, options)


def test_channels_last(rank_pool):
    rank_pool(2).run(compare, [4, 2], 4, torch.float32, {}, 0.0, True)


def test_a_large_mean_does_not_swallow_the_variance(rank_pool):
    # Squares of float32 would leave nothing of a variance of 1 beside a mean of 10000.
    rank_pool(2).run(compare, [40, 20], 4, torch.float64, {}, 1e4)
    rank_pool(2).run(_large_mean)


def _large_mean(rank, world):
    layer = ourddp.SyncBatchNorm(1, affine=False)
    torch.manual_seed(rank)
    output = layer(10_000 + torch.randn(50, 1, 10))
    moments = torch.stack([output.sum(), output.square().sum()]).double()
    dist.all_reduce(moments)
    mean, square = (moments / 1000).tolist()
    assert abs(mean) < 1e-3
    assert abs(square - 1) < 1e-3


@in_ranks(2)
def test_a_layer_without_bias(rank, world):
    norm = make_norm(4, torch.float32, {})
    norm.bias = None  # later versions of torch have an argument for it
    layer = ourddp.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(norm))
    assert layer.bias is None
    torch.manual_seed(0)
    whole = torch.randn(4, CHANNELS, 2, 2)
    torch.testing.assert_close(layer(whole[2 * rank :][:2]), norm(whole)[2 * rank :][:2])


@in_ranks(2, "backend")
def test_evaluation_is_local(rank, world):
    layer = ourddp.SyncBatchNorm.convert_sync_batchnorm(make_norm(4, torch.float32, {})).eval()
    plain = make_norm(4, torch.float32, {}).eval()
    untracked = ourddp.SyncBatchNorm(CHANNELS, track_running_stats=False).eval()
    if rank == 0:  # alone: nothing is communicated
        x = torch.randn(2, CHANNELS, 4, 4)
        assert torch.equal(layer(x), plain(x))
        torch.testing.assert_close(untracked(x), nn.BatchNorm2d(CHANNELS, track_running_stats=False)(x))
    assert all(bitwise_equal_everywhere(value) for value in layer.state_dict().values())


@in_ranks(3, "backend")
def test_each_group_has_its_own_statistics(rank, world):
    pairs = [dist.new_group([0, 1]), dist.new_group([2])]
    group = pairs[rank // 2]
    layer = ourddp.SyncBatchNorm(CHANNELS, affine=False, process_group=group)
    whole = torch.randn(6, CHANNELS, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    plain = nn.BatchNorm1d(CHANNELS, affine=False)
    part = whole[:4] if rank < 2 else whole[4:]
    expected = plain.double()(part)
    mine = part[2 * rank :][:2] if rank < 2 else part
    torch.testing.assert_close(layer.double()(mine), expected[2 * rank :][:2] if rank < 2 else expected)
    torch.testing.assert_close(layer.running_var, plain.running_var)
    converted = ourddp.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.BatchNorm1d(2)), group)
    assert converted[0].process_group is group


@in_ranks(2)
def test_one_reduction_each_way(rank, world):
    calls = []
    plain = dist.all_reduce

    def counted(tensor, *args, **kwargs):
        calls.append(tensor.numel())
        return plain(tensor, *args, **kwargs)

    dist.all_reduce = counted
    try:
        x = torch.randn(4, CHANNELS, requires_grad=True)
        ourddp.SyncBatchNorm(CHANNELS)(x).square().sum().backward()
    finally:
        dist.all_reduce = plain
    assert calls == [2 * CHANNELS + 1, 2 * CHANNELS]


@in_ranks(2, "backend")
def test_what_has_no_meaning_is_refused(rank, world):
    layer = ourddp.SyncBatchNorm(CHANNELS)
    alone = rf"more than 1 value per channel.*\({1 - rank}, 3\) on rank {rank}"
    for shape, text in [
        ((CHANNELS,), "expected at least 2D input"),
        ((2, 0), "channels should be non-zero"),
        ((1 - rank, CHANNELS), alone),
    ]:
        with pytest.raises(ValueError, match=text):
            layer(torch.randn(shape))
    empty = layer(torch.zeros(0, CHANNELS, requires_grad=True))
    empty.sum().backward()
    assert torch.equal(layer.running_var, torch.ones(CHANNELS))
    x = torch.randn(4, CHANNELS, requires_grad=True)
    (gradient,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


def test_conversion_keeps_everything():
    inner = nn.Sequential(nn.BatchNorm1d(2, momentum=None), nn.Linear(2, 2))
    theirs = nn.SyncBatchNorm(4, eps=0.5)
    model = nn.Sequential(nn.BatchNorm2d(3, affine=False), inner, theirs, nn.InstanceNorm1d(2), nn.ReLU()).eval()
    state, parameters = copy.deepcopy(model.state_dict()), list(model.parameters())
    converted = ourddp.SyncBatchNorm.convert_sync_batchnorm(model)
    assert converted is model
    assert [type(layer) for layer in (model[0], model[1][0], model[2])] == [ourddp.SyncBatchNorm] * 3
    assert isinstance(model[0], nn.SyncBatchNorm)
    assert type(model[3]) is nn.InstanceNorm1d
    assert (model[1][0].momentum, model[2].eps, model[0].affine) == (None, 0.5, False)
    assert not model[0].training
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    assert list(model.state_dict()) == list(state)
    nn.SyncBatchNorm(4).load_state_dict(model[2].state_dict())
    assert type(ourddp.SyncBatchNorm.convert_sync_batchnorm(nn.BatchNorm1d(2))) is ourddp.SyncBatchNorm
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # lazy layers are under development, says torch
        lazy = nn.Sequential(nn.LazyBatchNorm1d())
    with pytest.raises(ValueError, match="number of channels"):
        ourddp.SyncBatchNorm.convert_sync_batchnorm(lazy)


def test_without_process_group_it_is_a_plain_batch_norm():
    x = torch.randn(4, CHANNELS)
    layer, plain = ourddp.SyncBatchNorm(CHANNELS), nn.BatchNorm1d(CHANNELS)
    assert torch.equal(layer(x), plain(x))
    assert torch.equal(layer.running_var, plain.running_var)


@in_ranks(1)
def test_one_rank_is_a_plain_batch_norm(rank, world):
    test_without_process_group_it_is_a_plain_batch_norm()


@in_ranks(3, "backend")
def test_training_equals_one_process_with_the_whole_batch(rank, world):
    """Train a network with DistributedDataParallel, and one with plain batch norm on the whole batch."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Tanh(), nn.Flatten(), nn.LazyLinear(2)).double()
    plain(torch.zeros(2, 3, 6, 6, dtype=torch.float64))
    module = ourddp.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(plain))
    model = ourddp.DistributedDataParallel(module, bucket_cap_mb=0.0001)
    assert model._get_ddp_logging_data()["has_sync_bn"] == 1
    pairs = [(each, torch.optim.SGD(each.parameters(), 0.1)) for each in (plain, model)]
    for _ in range(4):
        batch = torch.randn(6 * world, 3, 6, 6, dtype=torch.float64)
        losses = []
        for (each, optimizer), part in zip(pairs, (batch, batch[rank * 6 :][:6]), strict=True):
            optimizer.zero_grad()
            loss = each(part).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        dist.all_reduce(losses[1])
        torch.testing.assert_close(losses[1] / world, losses[0])
    for mine, theirs in zip(module.state_dict().values(), plain.state_dict().values(), strict=True):
        torch.testing.assert_close(mine, theirs)
    with pytest.raises(ValueError, match=r"SyncBatchNorm layers only work with GPU modules.*convert_sync_batchnorm"):
        ourddp.DistributedDataParallel(nn.Sequential(nn.Linear(2, 2), nn.SyncBatchNorm(2)))
