"""Mixed precision of CPU modules: low in forward and backward, full outside."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.distributed as dist
from ddp_cases import backward, batches, loss_of, make_model, share
from ranks import in_ranks
from torch import nn
from torch.nn.parallel.distributed import _MixedPrecision

from ourddp import DistributedDataParallel

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


class Watched(nn.Module):
    """A model that checks its own precision."""

    def __init__(self, param_dtype, buffer_dtype):
        super().__init__()
        self.inner = make_model("mlp")
        self.frozen = nn.Parameter(torch.full((3,), 0.1), requires_grad=False)
        self.register_buffer("shift", torch.ones(3))
        self.register_buffer("count", torch.ones(3, dtype=torch.long))
        self.expected = (param_dtype, buffer_dtype)

    def forward(self, x):
        assert all(parameter.dtype == self.expected[0] for parameter in self.parameters())
        assert self.shift.dtype == self.expected[1]
        assert self.count.dtype == torch.long
        assert x.dtype == self.expected[0]
        return self.inner(x) + self.frozen + self.shift.to(x.dtype)


def _reference(model, batch, rank, world, dtypes):
    """Average gradients of low precision in the reduction's precision, as the configuration promises."""
    low = copy.deepcopy(model).to(dtypes[0])
    low.expected = (dtypes[0], dtypes[0])
    low.count = low.count.long()
    loss_of(low(share(batch, rank).to(dtypes[0]))).backward()
    found = {}
    for name, parameter in low.named_parameters():
        if parameter.grad is not None:
            gradient = parameter.grad.to(dtypes[1])
            dist.all_reduce(gradient)
            found[name] = (gradient / world).float()
    return found


def _train(rank, world, config, options):
    dtypes = (config.param_dtype, config.reduce_dtype or config.param_dtype)
    model = DistributedDataParallel(Watched(dtypes[0], config.buffer_dtype), mixed_precision=config, **options)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    for step, batch in enumerate(batches(world, 4)):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        expected = _reference(model.module, batch, rank, world, dtypes)
        assert all(parameter.dtype == FP32 for parameter in model.parameters())
        with torch.no_grad():
            assert model(share(batch, rank)).dtype == dtypes[0]
        assert all(parameter.dtype == FP32 for parameter in model.parameters())
        if step == 2:
            with model.no_sync():
                backward(model, batch, rank)
            model.zero_grad()
        backward(model, batch, rank)
        for name, parameter in model.module.named_parameters():
            assert parameter.dtype == FP32
            if name == "frozen":
                assert parameter.grad is None
                continue
            assert parameter.grad.dtype == FP32
            torch.testing.assert_close(parameter.grad, expected[name], rtol=2e-2, atol=1e-3)
            if dtypes[1] == FP32:
                torch.testing.assert_close(parameter.grad, expected[name])
        before = model.module.inner.layers[0].weight.clone()
        optimizer.step()
        assert not torch.equal(before, model.module.inner.layers[0].weight)
    # Full precision is what was trained.
    assert not torch.equal(before, before.to(dtypes[0]).float())
    return [parameter.tolist() for parameter in model.parameters()]


CONFIGS = {
    "bf16": _MixedPrecision(param_dtype=BF16, reduce_dtype=BF16, buffer_dtype=BF16),
    "bf16_reduced_in_fp32": _MixedPrecision(param_dtype=BF16, reduce_dtype=FP32, buffer_dtype=FP32),
    "fp16_by_default": _MixedPrecision(param_dtype=FP16, buffer_dtype=FP32),
}


OPTIONS = [
    {},
    {"find_unused_parameters": True},
    {"find_unused_parameters": True, "gradient_as_bucket_view": True, "bucket_cap_mb": 0.001},
    {"gradient_as_bucket_view": True, "bucket_cap_mb": 0.001},
    {"static_graph": True},
    {"static_graph": True, "gradient_as_bucket_view": True, "bucket_cap_mb": 0.001},
]


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("options", OPTIONS)
def test_gradients_are_those_of_low_precision(rank_pool, backend, config, options):
    first, second = rank_pool(2, backend).run(_train, config, dict(options))
    assert first == second


@in_ranks(2, "backend")
def test_the_reduction_alone_can_be_of_low_precision(rank, world):
    """Only what travels is of low precision."""
    model = DistributedDataParallel(make_model("mlp"), mixed_precision=_MixedPrecision(reduce_dtype=BF16))
    batch = next(batches(world, 1))
    backward(model, batch, rank)
    for parameter in model.parameters():
        assert parameter.dtype == parameter.grad.dtype == FP32
        assert torch.equal(parameter.grad, parameter.grad.to(BF16).float())
    alone = make_model("mlp")
    for other in range(world):
        (loss_of(alone(share(batch, other))) / world).backward()
    for mine, theirs in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=2e-2, atol=1e-3)


@in_ranks(2)
def test_an_evaluation_may_come_between_forward_and_backward(rank, world):
    """Neither an evaluation nor a forward that fails comes between a forward and its backward."""
    torch.manual_seed(1)
    module = nn.Sequential(nn.Linear(8, 3), nn.Linear(3, 0), nn.Linear(0, 1))
    model = DistributedDataParallel(module, mixed_precision=CONFIGS["bf16"])
    batch = next(batches(world, 1))
    for context in (torch.no_grad(), torch.enable_grad()):
        with context, pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            model(torch.ones(2, 7))
        assert all(p.dtype == FP32 for p in model.parameters())
    for _ in range(2):
        output = model(share(batch, rank))
        with torch.no_grad():
            model(share(batch, rank))
            with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
                model(torch.ones(2, 7))
        loss_of(output).backward()
        assert all(p.dtype == p.grad.dtype == FP32 for p in model.parameters())
        assert torch.equal(module[2].bias.grad, 2 * module[2].bias.to(BF16).float() + 1)
        module[2].bias.grad.fill_(0.1)
        with torch.no_grad():
            model(share(batch, rank))
        assert torch.equal(module[2].bias.grad, torch.tensor([0.1]))  # not rounded
        model.zero_grad()


class _Trip(torch.autograd.Function):
    """The identity, whose backward raises where it is told to."""

    @staticmethod
    def forward(ctx, inputs, trips):
        ctx.trips = trips
        return inputs.clone()

    @staticmethod
    def backward(ctx, gradient):
        if ctx.trips:
            raise ArithmeticError("tripped")
        return gradient, None


class Tripping(nn.Module):
    """Raises in backward, before the layer named by ``trips_before`` gets its gradients."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.layers = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 3)])
        self.trips_before = None

    def forward(self, x):
        for index, layer in enumerate(self.layers):
            x = _Trip.apply(layer(x), index == self.trips_before)
        return x


@pytest.mark.parametrize("options", OPTIONS)
@in_ranks(2)
def test_a_backward_that_raises_leaves_full_precision(rank, world, options):
    config = CONFIGS["bf16_reduced_in_fp32"]
    model = DistributedDataParallel(Tripping(), mixed_precision=config, **{"bucket_cap_mb": 0.0001, **options})
    (batch,) = batches(world, 1)
    for trips_before in (1, 0, 2, None):
        model.zero_grad()
        model.module.trips_before = trips_before
        weights = [parameter.detach().clone() for parameter in model.parameters()]
        if trips_before is None:
            backward(model, batch, rank)
        else:
            with pytest.raises(ArithmeticError, match="tripped"):
                backward(model, batch, rank)
            if trips_before == 0 and not options.get("static_graph"):
                with pytest.raises(RuntimeError, match="Expected to have finished"):
                    model(share(batch, rank))
            model._update_process_group(dist.group.WORLD)  # forgets the backward that did not end
        for parameter, weight in zip(model.parameters(), weights, strict=True):
            assert torch.equal(parameter, weight), trips_before  # of different dtypes they are not
            assert parameter.grad is None or parameter.grad.dtype == FP32, trips_before
    alone = copy.deepcopy(model.module).to(BF16)
    loss_of(alone(share(batch, rank).to(BF16))).backward()
    for mine, theirs in zip(model.parameters(), alone.parameters(), strict=True):
        gradient = theirs.grad.float()
        dist.all_reduce(gradient)
        torch.testing.assert_close(mine.grad, gradient / world)


@in_ranks(2)
def test_precision_stays_low_until_the_outermost_backward_ends(rank, world):
    config = CONFIGS["bf16_reduced_in_fp32"]
    model = DistributedDataParallel(make_model("reentrant"), mixed_precision=config, bucket_cap_mb=0.0001)
    alone = copy.deepcopy(model.module).to(BF16)
    for batch in batches(world, 3):
        model.zero_grad()
        backward(model, batch, rank)
        alone.zero_grad()
        loss_of(alone(share(batch, rank).to(BF16))).backward()
        for mine, theirs in zip(model.parameters(), alone.parameters(), strict=True):
            assert mine.dtype == FP32
            gradient = theirs.grad.float()
            dist.all_reduce(gradient)
            torch.testing.assert_close(mine.grad, gradient / world)


@pytest.mark.parametrize("views", [False, True])
@in_ranks(2)
def test_layers_that_only_others_use_get_gradients_of_full_precision(rank, world, views):
    """A rank gets gradients of full precision for what only others use, and none for what nobody uses."""
    config = CONFIGS["bf16_reduced_in_fp32" if views else "bf16"]
    module = make_model("branches")
    module.use = ("left", "right")[rank]
    options = {"static_graph": True, "gradient_as_bucket_view": views}
    model = DistributedDataParallel(module, mixed_precision=config, **options)
    for batch in batches(world, 3):
        model.zero_grad()
        backward(model, batch, rank)
        for name, parameter in module.named_parameters():
            if name.startswith("never"):
                assert parameter.grad is None
            else:
                assert parameter.dtype == parameter.grad.dtype == FP32, name
                assert parameter.grad.abs().sum() > 0, name


def _through_bytes(model):
    return pickle.loads(pickle.dumps(model))


@pytest.mark.parametrize("copy_of", [_through_bytes, copy.deepcopy])
@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}, {"static_graph": True}])
@in_ranks(2)
def test_a_model_can_be_pickled_and_copied(rank, world, copy_of, options):
    """A copy trains as the model that it is of, and neither does anything to the other."""
    config = CONFIGS["bf16_reduced_in_fp32"]
    model = DistributedDataParallel(Watched(BF16, FP32), mixed_precision=config, **options)
    steps = list(batches(world, 4))
    twins = [model]
    for step, batch in enumerate(steps):
        if step in (1, 2):  # a copy, and a copy of that one
            twins.append(copy_of(twins[-1]))
        for each in twins:
            each.zero_grad()
            backward(each, batch, rank)
            assert all(parameter.dtype == FP32 for parameter in each.parameters())
        for each in twins[1:]:
            for (name, mine), theirs in zip(each.named_parameters(), model.parameters(), strict=True):
                assert mine is not theirs
                assert (mine.grad is None) == (theirs.grad is None), name
                assert mine.grad is None or torch.equal(mine.grad, theirs.grad), name
    counts = [
        [len(hooks) for part in (each, each.module) for hooks in (part._forward_pre_hooks, part._forward_hooks)]
        for each in twins
    ]
    assert counts == [counts[0]] * 3
    assert all(len(each._comm_hooks) == 1 for each in twins)


@in_ranks(2)
def test_the_module_inside_can_be_copied_and_the_model_after_backward(rank, world):
    model = DistributedDataParallel(make_model("mlp"), mixed_precision=CONFIGS["bf16"])
    inputs = share(next(batches(world, 1)), rank)
    for copy_of in (_through_bytes, copy.deepcopy):
        alone = copy_of(model.module)
        assert alone(inputs).dtype == FP32  # the hooks that came along do nothing
    output = model(inputs)
    for copy_of in (_through_bytes, copy.deepcopy):
        with pytest.raises(RuntimeError, match="Do so after backward"):
            copy_of(model)
    loss_of(output).backward()
    copy.deepcopy(model)


@in_ranks(2)
def test_both_precisions_have_the_names_that_torch_gives_them(rank, world):
    module = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ["1.weight"])
    model = DistributedDataParallel(module, mixed_precision=_MixedPrecision(param_dtype=torch.bfloat16))
    for _ in range(2):
        for name, parameter in module.named_parameters():
            if name == "1.weight":
                assert not hasattr(parameter, "_fp_param")
                assert not hasattr(parameter, "_mp_param")
            else:
                assert parameter._fp_param.data_ptr() == parameter.data_ptr()
                assert parameter._mp_param.dtype == torch.bfloat16
                assert parameter._mp_param.untyped_storage().nbytes() == 0
        module[1].weight.data = module[1].weight.to(torch.bfloat16)
        model(torch.ones(4, 2)).sum().backward()
        module[1].weight.data = module[1].weight.float()
        module[1].weight.grad = None


@pytest.mark.parametrize("views", [False, True])
@in_ranks(2, "backend")
def test_unused_parameters_are_found_in_low_precision(rank, world, views):
    """Each step leaves other parameters unused; their gradients are not rounded because others are used."""
    config = CONFIGS["bf16_reduced_in_fp32"]
    module = make_model("branches")
    options = {"find_unused_parameters": True, "gradient_as_bucket_view": views}
    model = DistributedDataParallel(module, mixed_precision=config, **options)
    alone = copy.deepcopy(module).to(BF16)
    for step, batch in enumerate(batches(world, 4)):
        used = ("left", "right") if step < 2 else ("left", "left")
        model.zero_grad()
        # A number that low precision does not have.
        for name, parameter in module.named_parameters():
            if name.startswith(("never", "right")):
                parameter.grad = torch.full_like(parameter, 0.1)
        module.use = used[rank]
        backward(model, batch, rank)
        expected = {name: torch.zeros_like(p, dtype=FP32) for name, p in module.named_parameters()}
        for other in range(world):
            alone.use = used[other]
            alone.zero_grad()
            loss_of(alone(share(batch, other).to(BF16))).backward()
            for name, parameter in alone.named_parameters():
                # Where a rank already had a gradient, its own is added to that.
                before = torch.full_like(parameter, 0.1 if name.startswith("right") else 0.0)
                expected[name] += (before if parameter.grad is None else before + parameter.grad).float() / world
        for name, parameter in module.named_parameters():
            assert parameter.dtype == FP32, name
            if name.startswith("never") or (name.startswith("right") and "right" not in used):
                assert torch.equal(parameter.grad, torch.full_like(parameter, 0.1)), name
                continue
            assert parameter.grad.dtype == FP32, name
            torch.testing.assert_close(parameter.grad, expected[name], msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("views", [False, True])
@in_ranks(2, "backend")
def test_a_layer_may_be_of_low_precision_outside_as_well(rank, world, views):
    module = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2).to(BF16))
    options = {"gradient_as_bucket_view": views, "bucket_cap_mb": 0.001}
    model = DistributedDataParallel(module, mixed_precision=CONFIGS["bf16"], **options)
    inputs = torch.arange(8.0).view(2, 4) / 8 + rank
    for _ in range(2):
        model.zero_grad()
        alone = copy.deepcopy(module).to(BF16)
        alone(inputs.to(BF16)).float().sum().backward()
        model(inputs).float().sum().backward()
        for mine, own in zip(module.parameters(), alone.parameters(), strict=True):
            expected = own.grad.float()
            dist.all_reduce(expected)
            assert mine.grad.dtype == mine.dtype
            torch.testing.assert_close(mine.grad.float(), expected / world, rtol=2e-2, atol=1e-3)
