"""ModelParallel with layers that are shared, converted or fail, and steps that fail or run in autocast."""

from __future__ import annotations

import collections
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import in_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional

import ourddp
from ourddp import layer_costs


class Scale(nn.Module):
    """A module with a buffer and no parameters, as rotary embeddings are."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("factor", torch.full((4,), 2.0))

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return input * self.factor


class ExtraState(nn.Linear):
    def get_extra_state(self) -> dict[str, int]:
        return {"version": 1}

    def set_extra_state(self, state: dict[str, int]) -> None:
        assert state == {"version": 1}


class NoBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: torch.Tensor) -> torch.Tensor:
        return input.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        raise ArithmeticError("no slope")


class FailsInBackward(nn.Module):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return NoBackward.apply(input)


def linears(count: int = 2) -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Linear(4, 4) for _ in range(count)]


def batch(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(8, 4, generator=generator), torch.randn(8, 4, generator=generator)


def parallel(layers: Any, balance: Any = (1, 1), **settings: Any) -> ourddp.ModelParallel:
    return ourddp.ModelParallel(layers, batch()[0], functional.mse_loss, balance=balance, **settings)


def assert_steps_like(model: ourddp.ModelParallel, alone: nn.Module, **tolerance: float) -> None:
    """Check the loss and the gradients of a step against those of the whole model, whose loss has no gradients yet."""
    inputs, targets = batch()
    loss = functional.mse_loss(alone(inputs), targets)
    loss.backward()
    assert model.step(inputs, targets) == pytest.approx(loss.item(), rel=tolerance.get("rtol", 1e-5))
    expected = dict(alone.named_parameters())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name].grad, **{"rtol": 1e-4, "atol": 1e-6, **tolerance})


@in_ranks(2)
def test_modules_without_parameters_may_be_in_several_stages(rank: int, world: int) -> None:
    first, second = linears()
    scale, dropout = Scale(), nn.Dropout(0.0)
    model = parallel([nn.Sequential(first, scale), dropout, nn.Sequential(second, scale), dropout], balance=[2, 2])
    assert all(module.training for module in model.modules())
    assert not any(buffer.is_meta for buffer in model.buffers())
    assert [first.weight.is_meta, second.weight.is_meta] == [rank == 1, rank == 0]
    first, second = linears()
    alone = nn.Sequential(nn.Sequential(first, Scale()), nn.Identity(), nn.Sequential(second, Scale()))
    assert_steps_like(model, alone)


@in_ranks(4)
def test_data_ranks_have_equal_buffers(rank: int, world: int) -> None:
    torch.manual_seed(rank)
    frozen = nn.BatchNorm1d(4).requires_grad_(False)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "pipe"))
    torch.nn.init.normal_(frozen.weight)
    layers = [frozen, nn.Linear(4, 4), nn.BatchNorm1d(4)]
    model = parallel(layers, balance=[1, 2], group=mesh["pipe"], data_group=mesh["data"])
    inputs, targets = batch(seed=mesh.get_local_rank("data"))
    weights: list[Any] = [None] * 2

    def assert_equal_states() -> None:
        dist.all_gather_object(weights, model.state_dict(), group=mesh["data"].get_group())
        for name, value in weights[0].items():
            torch.testing.assert_close(weights[1][name], value, rtol=0, atol=0, msg=name)

    assert_equal_states()
    if mesh.get_local_rank("data") == 0:
        model.eval()(inputs)  # which needs no other pipeline
    model.train()
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    model.step(inputs, targets)
    assert_equal_states()
    assert not any(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())
    model(inputs)
    assert_equal_states()


@in_ranks(2)
def test_autocast(rank: int, world: int) -> None:
    model, alone = parallel(linears()), nn.Sequential(*linears())
    inputs, _ = batch()
    assert_steps_like(model, alone)
    model.zero_grad()
    alone.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        assert_steps_like(model, alone, rtol=0.05, atol=0.01)
        outputs = model(inputs, everywhere=True)
        assert outputs.dtype == torch.bfloat16
        torch.testing.assert_close(outputs, alone(inputs), rtol=0.05, atol=0.01)
    assert model(inputs, everywhere=True).dtype == torch.float32


@in_ranks(2)
def test_a_model_gets_another_type(rank: int, world: int) -> None:
    model, (inputs, targets) = parallel(linears()), batch()
    model.bfloat16()
    assert model.step(inputs.bfloat16(), targets.bfloat16()) > 0
    assert model(inputs.bfloat16(), everywhere=True).dtype == torch.bfloat16
    # From and to types of the same name on all ranks, whichever layers they have.
    model.double()
    assert model(inputs.double(), everywhere=True).dtype == torch.float64


@in_ranks(2)
def test_a_model_with_a_data_group_keeps_its_type(rank: int, world: int) -> None:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("data", "pipe"))
    model = parallel(linears(), balance=[2], group=mesh["pipe"], data_group=mesh["data"])
    with pytest.raises(RuntimeError, match="cannot get another type or device, as its gradients"):
        model.bfloat16()
    model.to("cpu", torch.float32)
    assert model.step(*batch()) > 0


@in_ranks(2)
def test_a_measurement_that_fails_is_an_error_of_all_ranks(rank: int, world: int) -> None:
    first, second = linears()
    with pytest.raises(ValueError, match=r"layer 1 \(FailsInBackward\) fails on inputs \(2, 4\): no slope"):
        parallel([first, FailsInBackward(), second], balance="time")
    first.scale = first.weight.sum()
    with pytest.raises(ValueError, match=r"layer 0 \(Linear\) fails on inputs .* deepcopy"):
        parallel([first, second], balance="time")


@pytest.mark.parametrize("balance", ["time", "memory"])
@in_ranks(2)
def test_layers_that_work_in_place(rank: int, world: int, balance: str) -> None:
    first, second = linears()
    model = parallel([first, nn.ReLU(inplace=True), second], balance=balance)
    first, second = linears()
    assert_steps_like(model, nn.Sequential(first, nn.ReLU(), second))


def test_what_two_layers_keep_is_counted_once() -> None:
    costs = layer_costs.measure([nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 4)], torch.randn(2, 4))
    # Each linear layer keeps its input, which is what the ReLU keeps of its output.
    assert [cost.activation_bytes for cost in costs] == [32, 32, 0]


def test_a_measurement_leaves_the_example_to_layers_that_work_in_place() -> None:
    example = -torch.ones(2, 4)
    layer_costs.measure([nn.ReLU(inplace=True)], example)
    assert torch.equal(example, -torch.ones(2, 4))


@in_ranks(2)
def test_a_layer_that_only_one_rank_has_frozen_is_refused(rank: int, world: int) -> None:
    layers = linears()
    layers[0].requires_grad_(rank == 0)
    with pytest.raises(ValueError, match="ranks 0 and 1 of the group have different weights"):
        parallel(layers)


@in_ranks(2)
def test_a_buffer_that_cannot_be_received_is_refused(rank: int, world: int) -> None:
    layers = linears()
    layers[1].register_buffer("rows", torch.arange(4.0).expand(3, 4))
    with pytest.raises(ValueError, match=r"buffer 1.rows has the same memory .* register its contiguous\(\)"):
        parallel(layers)


@in_ranks(2)
def test_layers_of_any_name_and_extra_state(rank: int, world: int) -> None:
    torch.manual_seed(0)
    names = ["step", "cut", "costs", "report", "full_state_dict", "_own"]
    layers = nn.Sequential(collections.OrderedDict((name, ExtraState(4, 4)) for name in names))
    model = parallel(layers, balance=[3, 3])
    assert model.step(*batch()) > 0
    model.load_state_dict(model.state_dict())
    expected = [f"{name}.{part}" for name in names for part in ("weight", "bias", "_extra_state")]
    assert list(model.full_state_dict()) == (expected if rank == 0 else [])


def only_positive(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    if bool((targets < 0).any()):
        raise ArithmeticError("a label is negative")
    return functional.mse_loss(outputs, targets)


@in_ranks(4, fresh=True)
def test_an_error_in_a_step_is_one_of_all_ranks_at_once(rank: int, world: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "pipe"))
    inputs, targets = batch()
    model = ourddp.ModelParallel(
        linears(), inputs, only_positive, balance=[1, 1], group=mesh["pipe"], data_group=mesh["data"]
    )
    bad = -targets.abs() if rank == 1 else targets.abs()
    begin = time.monotonic()
    with pytest.raises(ArithmeticError if rank == 1 else RuntimeError) as raised:
        model.step(inputs, bad)
    error = raised.value.__cause__ or raised.value  # torch wraps what is raised in backward
    assert ("a label is negative" if rank == 1 else "abort() was called") in str(error)
    assert time.monotonic() - begin < 30  # the timeout is twice as long


@in_ranks(2)
def test_no_samples_are_refused_on_all_ranks(rank: int, world: int) -> None:
    model, (inputs, targets) = parallel(linears()), batch()
    for call in (model, lambda inputs: model.step(inputs, targets[:0])):
        with pytest.raises(ValueError, match=r"a batch of shape \(0, 4\) has no samples"):
            call(inputs[:0])
    assert model.step(inputs, targets) > 0


@in_ranks(2)
def test_a_step_trains_in_no_grad_too(rank: int, world: int) -> None:
    model = parallel(linears())
    with torch.no_grad():
        model.step(*batch())
    assert all(parameter.grad is not None for parameter in model.parameters())
