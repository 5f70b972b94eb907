"""ModelParallel trains as one process does, keeps only its own layers, and says on all ranks what is wrong."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import in_ranks
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn import functional

import ourddp

BATCH, STEPS = 12, 4
SCHEDULES = ["gpipe", "1f1b", "interleaved"]


def make_layers(seed: int = 0) -> nn.Sequential:
    """Return layers of several shapes, some without weights, the first among them."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Unflatten(1, (1, 16)),
        nn.Conv1d(1, 4, 3, padding=1),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(64, 20),
        nn.Tanh(),
        nn.Linear(20, 12),
        nn.Linear(12, 12),
        nn.Tanh(),
        nn.Linear(12, 30),
        nn.LayerNorm(30),
        nn.Linear(30, 10),
        nn.Linear(10, 5),
    )


def batches(count: int = STEPS, size: int = BATCH) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(size, 16, generator=generator), torch.randint(5, (size,), generator=generator))
        for _ in range(count)
    ]


def meshes(world: int) -> DeviceMesh:
    return init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("data", "pipe"))


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def train_alone(model: nn.Module, size: int = BATCH) -> tuple[list[float], dict[str, torch.Tensor], torch.Tensor]:
    """Train in this process. Return the losses, the last gradients, and the outputs of the trained model."""
    optimizer, losses = optimizer_of(model), []
    for inputs, targets in batches(size=size):
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    with torch.no_grad():
        outputs = model(batches()[0][0])
    return losses, {name: parameter.grad for name, parameter in model.named_parameters()}, outputs


def train(model: ourddp.ModelParallel, share: slice = slice(None), size: int = BATCH) -> list[float]:
    optimizer, losses = optimizer_of(model), []
    for inputs, targets in batches(size=size):
        optimizer.zero_grad()
        losses.append(model.step(inputs[share], targets[share]))
        optimizer.step()
    return losses


def parallel(layers: Any = None, example: Any = None, **settings: Any) -> ourddp.ModelParallel:
    layers = make_layers() if layers is None else layers
    example = batches()[0][0] if example is None else example
    return ourddp.ModelParallel(layers, example, functional.cross_entropy, **settings)


def assert_trained_like_one_process(
    model: ourddp.ModelParallel, losses: list[float], expected: tuple[Any, ...], last: bool
) -> None:
    expected_losses, gradients, outputs = expected
    assert losses == pytest.approx(expected_losses, rel=1e-5)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-4, atol=1e-6, msg=name)
    inputs = batches()[0][0]
    mine = model(inputs)
    assert (mine is not None) == last
    torch.testing.assert_close(model(inputs, everywhere=True), outputs, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("world", [1, 2, 3, 4])
@in_ranks()
def test_a_training_equals_that_of_one_process(rank: int, world: int, schedule: str) -> None:
    expected = train_alone(make_layers())
    # The weights of other ranks do not count.
    layers = make_layers(seed=rank)
    micro_batches = 12 if world == 3 else 4
    model = parallel(layers, schedule=schedule, micro_batches=micro_batches)
    losses = train(model)
    assert_trained_like_one_process(model, losses, expected, last=rank == world - 1)


@pytest.mark.parametrize("balance", ["time", "memory", [4, 3, 6]], ids=str)
@in_ranks(3)
def test_every_balance_trains_alike(rank: int, world: int, balance: Any) -> None:
    expected = train_alone(make_layers())
    model = parallel(balance=balance)
    cuts: list[Any] = [None] * world
    dist.all_gather_object(cuts, (model.cut, model.costs))
    assert cuts == cuts[:1] * world
    assert (len(model.cut), sum(model.cut)) == (3, 13)
    if balance == [4, 3, 6]:
        assert (model.cut, model.costs) == (balance, [])
    else:
        assert all(cost.seconds > 0 for cost in model.costs)
        assert model.costs[4].weight_bytes == 4 * 65 * 20
    assert_trained_like_one_process(model, train(model), expected, last=rank == world - 1)
    assert len(model.report().splitlines()) == 5


@pytest.mark.parametrize("schedule", SCHEDULES)
@in_ranks(4)
def test_a_pipeline_of_two_on_two_halves_of_the_data_equals_one_process(rank: int, world: int, schedule: str) -> None:
    expected = train_alone(make_layers(), size=2 * BATCH)
    mesh = meshes(world)
    layers = make_layers(seed=rank)
    model = parallel(layers, schedule=schedule, group=mesh["pipe"], data_group=mesh["data"])
    half = mesh.get_local_rank("data")
    losses = train(model, slice(half * BATCH, (half + 1) * BATCH), size=2 * BATCH)
    assert_trained_like_one_process(model, losses, expected, last=mesh.get_local_rank("pipe") == 1)


@in_ranks(4)
def test_a_rank_holds_only_its_own_layers(rank: int, world: int) -> None:
    layers = make_layers()
    names, whole = list(dict(layers.named_parameters())), sum(tensor.nbytes for tensor in layers.parameters())
    model = parallel(layers, balance=[4, 3, 3, 3])
    own = dict(model.named_parameters())
    held: list[Any] = [None] * world
    dist.all_gather_object(held, list(own))
    assert [name for names_of_rank in held for name in names_of_rank] == names
    first, end = [(0, 4), (4, 7), (7, 10), (10, 13)][rank]
    assert all(first <= int(name.partition(".")[0]) < end for name in own)
    # What the program still holds of the others takes no memory.
    kept = sum(tensor.nbytes for tensor in layers.parameters() if not tensor.is_meta)
    assert kept == sum(tensor.nbytes for tensor in own.values()) < whole
    assert list(model.state_dict()) == list(own)


@in_ranks(3)
def test_states_are_those_of_the_whole_model(rank: int, world: int) -> None:
    whole = make_layers()
    expected = whole.state_dict()
    model = parallel(make_layers(seed=1), schedule="interleaved", micro_batches=3)
    inputs = batches()[0][0]
    assert not torch.allclose(model(inputs, everywhere=True), whole(inputs))
    assert model.load_state_dict(expected).missing_keys == []
    torch.testing.assert_close(model(inputs, everywhere=True), whole(inputs))
    full = model.full_state_dict()
    assert list(full) == (list(expected) if rank == 0 else [])
    assert all(torch.equal(full[name], expected[name]) for name in full)
    with pytest.raises(RuntimeError, match="unknown"):
        model.load_state_dict({**expected, "unknown": torch.zeros(1)})


@in_ranks(2)
def test_outputs_of_any_number_of_samples(rank: int, world: int) -> None:
    expected = make_layers()
    model = parallel(balance=[6, 7])
    for size in (1, 4, 7, 10, 12):
        inputs = batches(1, size)[0][0]
        torch.testing.assert_close(model(inputs, everywhere=True), expected(inputs), rtol=1e-4, atol=1e-6)
    assert all(parameter.grad is None for parameter in model.parameters())


@in_ranks(2)
def test_gradients_of_several_steps_add_up(rank: int, world: int) -> None:
    alone, model = make_layers(), parallel()
    for inputs, targets in batches(2):
        functional.cross_entropy(alone(inputs), targets).backward()
        model.step(inputs, targets)
    expected = dict(alone.named_parameters())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name].grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("schedule", SCHEDULES[:2])
@in_ranks(2)
def test_a_first_stage_without_gradients(rank: int, world: int, schedule: str) -> None:
    for first in (1, 4):
        alone, layers = make_layers(), make_layers()
        for frozen in (alone, layers):
            frozen[:first].requires_grad_(False)
        model = parallel(layers, balance=[first, 13 - first], schedule=schedule)
        inputs, targets = batches()[0]
        loss = functional.cross_entropy(alone(inputs), targets)
        loss.backward()
        assert model.step(inputs, targets) == pytest.approx(loss.item(), rel=1e-5)
        expected = dict(alone.named_parameters())
        for name, parameter in model.named_parameters():
            if rank == 0:
                assert parameter.grad is None
            else:
                torch.testing.assert_close(parameter.grad, expected[name].grad, rtol=1e-4, atol=1e-6)


@in_ranks(2)
def test_a_measurement_leaves_layers_and_random_numbers_alone(rank: int, world: int) -> None:
    layers = nn.Sequential(nn.Linear(16, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.Linear(8, 5))
    torch.manual_seed(3)
    state = torch.get_rng_state()
    model = parallel(layers, schedule="gpipe")
    assert torch.equal(torch.get_rng_state(), state)
    assert all(buffer.count_nonzero() == 0 for name, buffer in model.named_buffers() if "running_mean" in name)
    assert all(parameter.grad is None for parameter in model.parameters())


class Fails(nn.Module):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        raise ArithmeticError("no such thing")


class Pair(nn.Module):
    def forward(self, input: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return input, input


class NeedsValues(nn.Module):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return input * 2 if input.sum().item() > 0 else input


def with_shared() -> nn.Sequential:
    layers = make_layers()
    layers[12].weight = nn.Parameter(torch.randn(12, 12))
    layers[7].weight = layers[12].weight
    return layers


REFUSED: list[tuple[type[Exception], str, dict[str, Any]]] = [
    (ValueError, "no schedule 'zigzag': use one of gpipe, 1f1b, interleaved", {"schedule": "zigzag"}),
    (ValueError, r"shape \(12, 16\) cannot be split into 5 equal micro-batches: pass a multiple", {"micro_batches": 5}),
    (ValueError, "1f1b needs a micro-batch for each of its 2 stages, not 1", {"micro_batches": 1}),
    (ValueError, "micro_batches must be at least 1", {"micro_batches": 0}),
    (TypeError, "micro_batches must be an int, not float", {"micro_batches": 4.0}),
    (ValueError, "interleaved needs a multiple of 2 micro-batches", {"schedule": "interleaved", "micro_batches": 3}),
    (ValueError, "interleaved needs several stages", {"schedule": "interleaved", "stages_per_rank": 1}),
    (ValueError, "gpipe has one stage on each rank, not 2", {"schedule": "gpipe", "stages_per_rank": 2}),
    (ValueError, "there is no balance 'luck': use one of time, memory", {"balance": "luck"}),
    (ValueError, r"balance \[13\] does not fit: it takes 2 numbers", {"balance": [13]}),
    (ValueError, r"balance \[6, 6\] does not fit: .* add up to 13", {"balance": [6, 6]}),
    (TypeError, "balance must be a string or a list", {"balance": 2.5}),
    (ValueError, "1 layers cannot make 2 stages: use fewer ranks", {"layers": [nn.Linear(16, 5)]}),
    (ValueError, "2 layers, 1 of which can begin", {"layers": [nn.Linear(16, 5), nn.Tanh()]}),
    (TypeError, "layers must be an nn.Sequential or a list of modules, not Linear", {"layers": nn.Linear(16, 5)}),
    (TypeError, "layer 1 must be a module, not function", {"layers": [nn.Linear(16, 5), functional.relu]}),
    (ValueError, "layer 0 does not know its shape yet", {"layers": [nn.LazyLinear(5), nn.Linear(5, 5)]}),
    (ValueError, r"layer 1 \(Fails\) fails on inputs \(3, 5\): no such", {"layers": [nn.Linear(16, 5), Fails()]}),
    (TypeError, r"layer 1 \(Pair\) returns tuple", {"layers": [nn.Linear(16, 5), Pair()]}),
    (
        ValueError,
        "stage 0 cannot tell the shape",
        {"layers": [nn.Linear(16, 5), NeedsValues(), nn.Linear(5, 5)]},
    ),
    (ValueError, "stages 0 and 1 share the parameter weight", {"layers": with_shared(), "balance": [10, 3]}),
    (TypeError, "example must be a tensor", {"example": [1.0]}),
]


@in_ranks(2)
def test_mistakes_are_refused_on_all_ranks(rank: int, world: int) -> None:
    for kind, message, arguments in REFUSED:
        with pytest.raises(kind, match=message):
            parallel(**arguments)
    with pytest.raises(ValueError, match="mesh of 2 dimensions: pass one of them"):
        parallel(group=init_device_mesh("cpu", (2, 1), mesh_dim_names=("pipe", "data")))
    with pytest.raises(TypeError, match="loss_fn must be a function"):
        ourddp.ModelParallel(make_layers(), batches()[0][0], 1)


@in_ranks(2)
def test_a_mistake_of_one_rank_is_told_to_all(rank: int, world: int) -> None:
    with pytest.raises(ValueError, match="1f1b needs a micro-batch" if rank else "rank 1 of the group: 1f1b needs a"):
        parallel(micro_batches=1 if rank else 4)
    with pytest.raises(ValueError, match=r"ranks 0 and 1 of the group have different settings: .* All ranks must"):
        parallel(micro_batches=2 if rank else 4)
    with pytest.raises(ValueError, match="ranks 0 and 1 of the group have different weights"):
        parallel([nn.Linear(16, 5 + rank), nn.Linear(5 + rank, 5)])


@in_ranks(2)
def test_a_batch_that_does_not_fit_is_refused_on_all_ranks(rank: int, world: int) -> None:
    model = parallel()
    inputs, targets = batches()[0]
    with pytest.raises(ValueError, match=r"shape \(7, 16\) cannot be split into 4 equal"):
        model.step(inputs[:7], targets[:7])
    with pytest.raises(ValueError, match="11 targets for 12 inputs"):
        model.step(inputs, targets[:11])
    assert model.step(inputs[:8], targets[:8]) > 0  # another size


def test_it_needs_a_process_group() -> None:
    with pytest.raises(RuntimeError, match=r"there is no process group: call ourddp.init\(\) first"):
        parallel()
