"""Weighted gradients: ranks with unequal shares of a batch get the gradients of one process that has all of it."""

from __future__ import annotations

import inspect
import random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ddp_cases import MODELS, TorchDDP, known, make_model, skip_sparse_over_gloo
from ranks import in_ranks, run_ranks
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook, quantization_hooks
from torch.nn.parallel.distributed import _MixedPrecision
from weight_cases import (
    ROUNDING,
    SHAPES,
    UNEVEN,
    WAYS,
    Split,
    accumulate,
    assert_close,
    average_by_hook,
    batch_of,
    check,
    expected_gradients,
    number_of_collectives,
    sum_loss,
)

from ourddp import DistributedDataParallel

CASES, STEPS = 25, 4  # 100 random splits

# --- random splits ---------------------------------------------------------------------------------------------------


def random_split(choose: random.Random, world: int, parts: int) -> Split:
    split = [[choose.choice([0, 1, 2, 3, 5, 8, 13]) for _ in range(parts)] for _ in range(world)]
    split[choose.randrange(world)][0] += 1  # somebody has a sample
    return split


def check_random_case(rank: int, world: int, seed: int) -> None:
    choose = random.Random(seed)
    name = choose.choice(SHAPES)
    options = {
        "gradient_as_bucket_view": choose.random() < 0.5,
        "find_unused_parameters": choose.random() < 0.3,
        "static_graph": choose.random() < 0.3,
        "bucket_cap_mb": choose.choice([25, 0.002, 0.05]),
        "batched_grad_copy": choose.random() < 0.3,
        "lazy_bucket_allocation": choose.random() < 0.3,
    }
    options = {name: value for name, value in options.items() if name in inspect.signature(TorchDDP).parameters}
    # In float32 "transposed" loses digits by itself, where its tanh is close to 1.
    double = name not in ("two_types", "mixed") and (choose.random() < 0.5 or name == "transposed")
    # The gradients of a static graph accumulate from its second step on.
    splits = [random_split(choose, world, choose.choice([1, 1, 3]) if step else 1) for step in range(STEPS)]
    check(rank, name, options, splits, double=double, tolerance=1e-12 if double else ROUNDING)


@pytest.mark.parametrize("world", [2, 3])
def test_random_splits_equal_one_process(rank_pool, world):
    for seed in range(CASES):
        rank_pool(world).run(check_random_case, seed)


# --- each way that gradients travel ----------------------------------------------------------------------------------


def check_ways(rank: int, world: int, name: str) -> None:
    double = name not in ("two_types", "mixed")
    for options in WAYS.values():
        check(rank, name, options, UNEVEN, double=double, tolerance=1e-12 if double else ROUNDING)


@pytest.mark.parametrize("name", SHAPES)
def test_unequal_shares_equal_one_process(rank_pool, backend, name):
    skip_sparse_over_gloo(backend, name)
    rank_pool(2, backend).run(check_ways, name)


@in_ranks(2, nodes=2)
def test_unequal_shares_on_two_nodes_equal_one_process(rank, world):
    for name in ("wide", "sparse"):
        check(rank, name, {}, UNEVEN)


@in_ranks(2)
def test_gradients_are_weighted_where_they_lie(rank, world):
    model = check(rank, "wide", {}, UNEVEN[:3])
    assert model.reducer._get_status().reduced_in_place == 2


@in_ranks(2)
def test_weights_take_no_collective_of_their_own(rank, world):
    for name in ("mlp", "wide", "two_types", "sparse"):
        for options in WAYS.values():
            counts = []
            for weighted in (False, True):
                model = DistributedDataParallel(make_model(name), **options)
                before = number_of_collectives()
                for step in range(3):
                    if weighted:
                        model.set_weight(3)
                    accumulate(model, rank, [[3], [3]], step)
                counts.append(number_of_collectives() - before)
            assert counts[0] == counts[1], (name, options)


@in_ranks(2)
def test_a_model_of_sparse_gradients_takes_one_small_reduction_more(rank, world):
    MODELS["table"] = lambda: nn.Sequential(nn.Embedding(20, 3, sparse=True))
    alone, module = make_model("table"), make_model("table")
    model = DistributedDataParallel(module)
    words = [torch.tensor([1, 2, 2]), torch.tensor([2])]
    (alone(torch.cat(words)).square().sum() / 4).backward()
    counts = []
    for weighted in (False, True):
        for _ in range(2):  # the buckets are rebuilt once
            model.zero_grad()
            if weighted:
                model.set_weight(len(words[rank]))
            output = model(words[rank])
            before = number_of_collectives()
            output.square().sum().backward()
        counts.append(number_of_collectives() - before)
    assert counts[1] == counts[0] + 1
    assert_close(model, [parameter.grad for parameter in alone.parameters()])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_sum_of_weights_is_exact_in_low_precision(rank_pool, dtype):
    rank_pool(3).run(check_low_precision, dtype)


def check_low_precision(rank: int, world: int, dtype: torch.dtype) -> None:
    model = DistributedDataParallel(nn.Linear(1, 1, bias=False).to(dtype))
    counts = [100_001, 0, 2]  # their sum has more bits than a number of this type
    model.set_weight(counts[rank])
    model(torch.full((1, 1), 1024.0).to(dtype)).sum().backward()
    assert model.module.weight.grad.item() == torch.tensor(3072 / 100_003).to(dtype).item()


@in_ranks(2)
def test_a_branch_that_some_ranks_use(rank, world):
    for options in ({}, {"gradient_as_bucket_view": True}):
        model = DistributedDataParallel(make_model("branches"), find_unused_parameters=True, **options)
        model.module.use = ("left", "right")[rank]
        alone = make_model("branches")
        parts = batch_of([[3], [5]], 1, torch.float32)
        for use, [part] in zip(("left", "right"), parts, strict=True):
            alone.use = use
            (sum_loss(alone(part)) / 8).backward()
        for _ in range(2):
            model.zero_grad()
            model.set_weight((3, 5)[rank])
            sum_loss(model(parts[rank][0])).backward()
            assert_close(model, [parameter.grad for parameter in alone.parameters()])


@in_ranks(2)
def test_the_first_weight_may_come_late(rank, world):
    """The buckets are made anew then, and what has been accumulated in them stays."""
    split = [[1, 2, 3], [4, 0, 1]]
    for options in WAYS.values():
        model = DistributedDataParallel(make_model("mlp"), **options)
        parts = batch_of(split, 0, torch.float32)[rank]
        if not options.get("static_graph"):
            for part in parts[:2]:
                with model.no_sync():
                    sum_loss(model(part)).backward()
            output = model(parts[2])
        else:
            output = model(torch.cat(parts))
        model.set_weight(sum(split[rank]))
        sum_loss(output).backward()
        assert_close(model, expected_gradients(make_model("mlp"), split, 0), where=options)


@in_ranks(2)
def test_buckets_that_are_not_reduced_cannot_carry_weights(rank, world):
    options = known({"skip_all_reduce_unused_params": True})
    model = DistributedDataParallel(
        make_model("branches"), find_unused_parameters=True, bucket_cap_mb=0.0001, **options
    )
    alone = make_model("branches")
    for step, split in enumerate(UNEVEN):
        model.zero_grad()
        model.set_weight(split[rank][0])
        accumulate(model, rank, split, step)
        assert_close(model, expected_gradients(alone, split, step))


# --- communication hooks and precisions ------------------------------------------------------------------------------


def _builtin(model: DistributedDataParallel) -> None:
    model._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)


def _bf16(model: DistributedDataParallel) -> None:
    model.register_comm_hook(None, default_hooks.bf16_compress_hook)


def _power_sgd(model: DistributedDataParallel) -> None:
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=16, start_powerSGD_iter=2)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)


NEEDS_QUANTISING = pytest.mark.skipif(torch.__version__.startswith("2.11."), reason="torch 2.11's hook fails")


def _quantized(model: DistributedDataParallel) -> None:
    model.register_comm_hook(dist.group.WORLD, quantization_hooks.quantization_pertensor_hook)


@pytest.mark.parametrize(
    ("hook", "tolerance"),
    [
        (average_by_hook, ROUNDING),
        (_builtin, 2e-3),
        (_bf16, 1e-2),
        pytest.param(_quantized, 0.2, marks=NEEDS_QUANTISING),
        (_power_sgd, 0.3),
    ],
)
def test_hooks_average_weighted_gradients(rank_pool, hook, tolerance):
    rank_pool(2).run(check_hook, hook, tolerance)


def check_hook(rank: int, world: int, hook: Any, tolerance: float) -> None:
    for options in WAYS.values():
        check(rank, "mlp", dict(options), UNEVEN, hook=hook, tolerance=tolerance)


@in_ranks(2)
def test_a_hook_may_come_after_the_first_weight(rank, world):
    for options in ({}, {"gradient_as_bucket_view": True}):
        model = check(rank, "mlp", options, UNEVEN[:2])
        expected = expected_gradients(make_model("mlp"), UNEVEN[0], 0)
        model.module.load_state_dict(make_model("mlp").state_dict())
        average_by_hook(model)
        model.zero_grad()
        model.set_weight(UNEVEN[0][rank][0])
        accumulate(model, rank, UNEVEN[0], 0)
        assert_close(model, expected)


def average_over_a_narrow_wire(rank: int, world: int) -> float:
    """Return an average of gradients that half types represent, by weights of which the sum is not."""
    model = DistributedDataParallel(nn.Linear(256, 256))
    model.set_weight([100_001, 300_007][rank])
    (model(torch.ones(1, 256)).sum() * [1024, 2048][rank]).backward()
    return model.module.weight.grad[0, 0].item()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_weights_are_added_up_exactly_whatever_type_travels(dtype):
    for average in run_ranks(2, average_over_a_narrow_wire, nodes=2, env={"OURS_WIRE_DTYPE": dtype}):
        assert average == pytest.approx(3072 / 400_008, rel=1e-6)


@in_ranks(2)
def test_optimizers_in_backward_get_weighted_gradients(rank, world):
    from torch.distributed.optim import _apply_optimizer_in_backward

    alone, module = make_model("mlp"), make_model("mlp")
    _apply_optimizer_in_backward(torch.optim.SGD, module.parameters(), {"lr": 0.1})
    model = DistributedDataParallel(module)
    optimizer = torch.optim.SGD(alone.parameters(), 0.1)
    for step, split in enumerate(UNEVEN):
        expected_gradients(alone, split, step)
        optimizer.step()
        model.set_weight(split[rank][0])
        accumulate(model, rank, split, step)
        for mine, theirs in zip(module.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(mine, theirs)


@in_ranks(2)
def test_mixed_precision(rank, world):
    for reduce in (torch.float32, torch.bfloat16):
        config = _MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=reduce)
        check(rank, "mlp", {"mixed_precision": config}, UNEVEN, tolerance=0.05)
