"""ourddp.functional: collectives with results of their own and gradients, eager and compiled, over any group."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from ranks import in_ranks
from torch import nn

import ourddp
from ourddp import functional

Tensors = list[torch.Tensor]


def own_part(tensor: torch.Tensor, rank: int, world: int, dim: int = 0) -> torch.Tensor:
    return tensor.chunk(world, dim)[rank]


# Each with what a rank calls, and what all ranks have after it, computed by one process from the tensors of all ranks.
# The tensors are of (2 * world, 4 * world).
CASES: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], Callable[[Tensors], Tensors]]] = {
    "all_reduce": (functional.all_reduce, lambda all: [sum(all)] * len(all)),
    "all_reduce avg": (lambda t: functional.all_reduce(t, "avg"), lambda all: [sum(all) / len(all)] * len(all)),
    "all_gather": (functional.all_gather, lambda all: [torch.cat(all)] * len(all)),
    "all_gather columns": (lambda t: functional.all_gather(t, -1), lambda all: [torch.cat(all, 1)] * len(all)),
    "reduce_scatter": (
        functional.reduce_scatter,
        lambda all: [own_part(sum(all), rank, len(all)) for rank in range(len(all))],
    ),
    "reduce_scatter avg of columns": (
        lambda t: functional.reduce_scatter(t, "avg", dim=1),
        lambda all: [own_part(sum(all) / len(all), rank, len(all), 1) for rank in range(len(all))],
    ),
    "all_to_all": (
        functional.all_to_all,
        lambda all: [torch.cat([own_part(t, rank, len(all)) for t in all]) for rank in range(len(all))],
    ),
    "reduce": (lambda t: functional.reduce(t, 0), lambda all: [sum(all)] + [0 * all[0]] * (len(all) - 1)),
    "reduce avg": (
        lambda t: functional.reduce(t, dist.get_world_size() - 1, "avg"),
        lambda all: [0 * all[0]] * (len(all) - 1) + [sum(all) / len(all)],
    ),
    "broadcast": (lambda t: functional.broadcast(t, dist.get_world_size() - 1), lambda all: [all[-1]] * len(all)),
}
REDUCTIONS = {
    "sum": lambda all: all.sum(0),
    "product": lambda all: all.prod(0),
    "min": lambda all: all.amin(0),
    "max": lambda all: all.amax(0),
    "band": lambda all: all[0] & all[1] & all[2],
    "bor": lambda all: all[0] | all[1] | all[2],
    "bxor": lambda all: all[0] ^ all[1] ^ all[2],
}


def inputs(world: int, dtype: torch.dtype = torch.double) -> Tensors:
    """Return the tensors of all ranks."""
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(2 * world, 4 * world, generator=generator, dtype=dtype) for _ in range(world)]


def weights_for(outputs: Tensors) -> Tensors:
    generator = torch.Generator().manual_seed(6)
    return [torch.randn(output.shape, generator=generator, dtype=output.dtype) for output in outputs]


def check_cases(rank: int, world: int) -> None:
    for name, (call, model) in CASES.items():
        alone = [tensor.requires_grad_() for tensor in inputs(world)]
        expected = model(alone)
        weights = weights_for(expected)
        sum((weight * output.square()).sum() for weight, output in zip(weights, expected, strict=True)).backward()
        mine = inputs(world)[rank].requires_grad_()
        output = call(mine)
        torch.testing.assert_close(output, expected[rank], msg=lambda m, name=name: f"{name}: {m}")
        (weights[rank] * output.square()).sum().backward()
        own = alone[rank].grad if alone[rank].grad is not None else torch.zeros_like(mine)
        torch.testing.assert_close(mine.grad, own, msg=lambda m, name=name: f"gradient of {name}: {m}")
        assert torch.equal(mine, inputs(world)[rank]), name
    scalar = torch.tensor(2.0 + rank, requires_grad=True)
    gathered = functional.all_gather(scalar)
    assert gathered.tolist() == [2.0 + r for r in range(world)]
    gathered[0].backward()
    assert scalar.grad.item() == (world if rank == 0 else 0)


@pytest.mark.parametrize("world", [1, 2, 3])
@in_ranks(None, "nodes")
def test_results_and_gradients_are_those_of_one_process(rank, world):
    check_cases(rank, world)


@in_ranks(3)
def test_all_reductions_of_integers(rank, world):
    all = torch.arange(1, 13).reshape(3, 4) % 7
    for op, model in REDUCTIONS.items():
        assert torch.equal(functional.all_reduce(all[rank], op), model(all)), op


@in_ranks(2)
def test_other_tensors(rank, world):
    pair = torch.tensor([[1 + 2j, 3j], [4, 5 - 1j]])
    assert torch.equal(functional.all_reduce(pair[rank]), pair.sum(0))
    assert torch.equal(functional.all_gather(pair[rank]), pair.flatten())
    assert torch.equal(functional.all_reduce(pair.t()), 2 * pair.t())
    assert functional.all_reduce(pair.t()).is_contiguous()
    assert functional.all_reduce(torch.empty(0, 3)).shape == (0, 3)
    product = functional.all_reduce(pair[rank], "product")
    assert torch.equal(product, pair.prod(0))
    flags = functional.all_reduce(torch.tensor([rank == 0, False]), "max")
    assert flags.tolist() == [True, False]


@in_ranks(3)
def test_parts_of_unequal_sizes(rank, world):
    # Rank r sends s + 1 rows to rank s, and so receives r + 1 rows from each.
    rows = torch.tensor([[10.0 * rank + to] for to in range(3) for _ in range(to + 1)], requires_grad=True)
    received = functional.all_to_all(rows, [rank + 1] * 3, [1, 2, 3])
    assert received.flatten().tolist() == [10.0 * source + rank for source in range(3) for _ in range(rank + 1)]
    (received * (rank + 1)).sum().backward()
    assert rows.grad.flatten().tolist() == [1, 2, 2, 3, 3, 3]
    # Equal parts of one size from rank 0, and of another from the others, without saying what this rank sends.
    count = 2 if rank == 0 else 1
    rows = torch.full((3 * count,), 1.0 + rank, requires_grad=True)
    received = functional.all_to_all(rows, [2, 1, 1])
    assert received.tolist() == [1, 1, 2, 3]
    (received * (rank + 1)).sum().backward()
    assert rows.grad.tolist() == [to + 1.0 for to in range(3) for _ in range(count)]


@in_ranks(3)
def test_subgroups_and_groups_by_name(rank, world):
    group = dist.new_group([1, 2])
    if rank > 0:
        for who in (group, group.group_name):
            assert functional.all_reduce(torch.tensor([rank]), "sum", who).item() == 3
            assert functional.all_gather(torch.tensor([[rank]]), 1, group=who).tolist() == [[1, 2]]
            assert functional.broadcast(torch.tensor([rank]), 1, who).item() == 2


@in_ranks(2, backend="gloo")
def test_groups_of_other_backends(rank, world):
    check_cases(rank, world)


@in_ranks(2)
def test_a_call_is_one_collective_and_nothing_else(rank, world):
    tensor = torch.ones(4)
    before = ourddp.stats().begun
    functional.all_reduce(tensor)
    functional.all_gather(tensor)
    functional.copy_to_ranks(tensor)
    assert ourddp.stats().begun == before + 2


@in_ranks(2)
def test_a_network_that_is_cut_by_columns_and_rows_learns_as_a_whole(rank, world):
    torch.manual_seed(1)
    whole = nn.Sequential(nn.Linear(6, 8, bias=False), nn.Tanh(), nn.Linear(8, 3, bias=False))
    first = own_part(whole[0].weight.detach(), rank, world).clone().requires_grad_()
    second = own_part(whole[2].weight.detach(), rank, world, 1).clone().requires_grad_()
    data = torch.randn(5, 6)
    theirs, mine = data.clone().requires_grad_(), data.clone().requires_grad_()
    whole(theirs).square().sum().backward()
    hidden = (functional.copy_to_ranks(mine) @ first.t()).tanh()
    functional.reduce_from_ranks(hidden @ second.t()).square().sum().backward()
    torch.testing.assert_close(mine.grad, theirs.grad)
    torch.testing.assert_close(first.grad, own_part(whole[0].weight.grad, rank, world))
    torch.testing.assert_close(second.grad, own_part(whole[2].weight.grad, rank, world, 1))


@in_ranks(2)
def test_gradients_have_gradients(rank, world):
    tensor = torch.tensor([1.0 + rank], requires_grad=True)
    total = functional.all_reduce(tensor)
    [gradient] = torch.autograd.grad((total**3).sum(), tensor, create_graph=True)
    assert gradient.item() == 2 * 3 * 3**2
    [second] = torch.autograd.grad(gradient.sum(), tensor)
    assert second.item() == 2 * 2 * 6 * 3


@in_ranks(2)
def test_gradients_of_layers_that_are_cut_have_gradients(rank, world):
    def penalty(tensor: torch.Tensor, weight: torch.Tensor, cut: bool) -> torch.Tensor:
        if cut:
            parts = (functional.copy_to_ranks(tensor) * own_part(weight, rank, world)) ** 3
            output = functional.reduce_from_ranks(parts)
        else:
            output = ((tensor * weight) ** 3).sum(0, keepdim=True)
        [gradient] = torch.autograd.grad((output**2).sum(), tensor, create_graph=True)
        return (gradient**2).sum()

    found = []
    for cut in (False, True):
        tensor = torch.tensor([1.5], dtype=torch.double, requires_grad=True)
        weight = torch.tensor([[1.0], [2.0]], dtype=torch.double, requires_grad=True)
        penalty(tensor, weight, cut).backward()
        found.append((tensor.grad, own_part(weight.grad, rank, world)))
    torch.testing.assert_close(found[1], found[0])


@in_ranks(1)
def test_torch_finds_nothing_wrong_with_the_operators(rank, world):
    ops, name = torch.ops.ours, dist.group.WORLD.group_name
    x = torch.randn(4, 3, requires_grad=True)
    for op, args in {
        ops.all_reduce.default: (x, "sum", name),
        ops.all_gather_into_tensor.default: (x, 1, name),
        ops.reduce_scatter_tensor.default: (x, "avg", 1, name),
        ops.all_to_all_single.default: (x, [4], [4], name),
        ops.reduce.default: (x, "sum", 0, name),
        ops.broadcast.default: (x, 0, name),
    }.items():
        torch.library.opcheck(op, args)


def _layer(data: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    hidden = functional.copy_to_ranks(data) @ weight
    total = functional.reduce_from_ranks(hidden.relu())
    gathered = functional.all_gather(total, 1)
    part = functional.reduce_scatter(gathered, "avg", 1)
    swapped = functional.all_to_all(functional.all_reduce(part, "sum"))
    return functional.reduce(functional.broadcast(swapped, 1), 0).sum()


@in_ranks(2, timeout=180, pg_timeout=180)
def test_it_compiles_without_a_break(rank, world):
    torch._dynamo.reset()
    compiled = torch.compile(_layer, backend="aot_eager", fullgraph=True)
    found = []
    for call in (_layer, compiled):
        torch.manual_seed(rank)
        data, weight = torch.randn(4, 6, requires_grad=True), torch.randn(6, 2, requires_grad=True)
        result = call(data, weight)
        result.backward()
        found.append((result.detach(), data.grad, weight.grad))
    torch.testing.assert_close(found[1], found[0])


@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
@in_ranks(2, timeout=180, pg_timeout=180)
def test_compilers_keep_calls_without_use_and_their_order(rank, world, compiler):
    def ask(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:  # for which no C++ has to be compiled
        gathered = functional.all_gather(tensor)
        total = functional.all_reduce(tensor)
        return (total, gathered) if rank == 0 else (tensor.t(),)

    torch._dynamo.reset()
    before = ourddp.stats().begun
    # torch keeps compiled code from one run of the tests to the next.
    with tempfile.TemporaryDirectory() as folder, mock.patch.dict(os.environ, {"TORCHINDUCTOR_CACHE_DIR": folder}):
        compiled = torch.compile(ask, backend=compiler, fullgraph=True)
        (compiled if rank == 0 else ask)(torch.ones(3, 2))
        (compiled if rank == 1 else ask)(torch.ones(3, 2))
    assert ourddp.stats().begun == before + 4


# --- mistakes --------------------------------------------------------------------------------------------------------


@in_ranks(2)
def test_impossible_arguments(rank, world):
    tensor = torch.ones(3, 4)
    with pytest.raises(ValueError, match="'mean', and has to be sum, avg"):
        functional.all_reduce(tensor, "mean")
    for dim in (2, -3):
        with pytest.raises(IndexError):
            functional.all_gather(tensor, dim)
        with pytest.raises(IndexError):
            functional.reduce_scatter(tensor, "sum", dim)
    with pytest.raises(ValueError, match="reduce_scatter_tensor"):
        functional.reduce_scatter(tensor)
    with pytest.raises(ValueError, match="reduce_scatter_tensor"):
        functional.reduce_scatter(torch.tensor(1.0))
    with pytest.raises(ValueError, match="root"):
        functional.broadcast(tensor, 2)
    with pytest.raises(ValueError, match="all_to_all_single"):
        functional.all_to_all(tensor, [-1, 2], [1, 2])
    with pytest.raises(ValueError, match="all_to_all_single"):
        functional.all_to_all(torch.tensor(1.0))
    with pytest.raises(ValueError, match="complex"):
        functional.all_reduce(torch.ones(2, dtype=torch.complex64), "max")
    with pytest.raises(ValueError, match="has 2 ranks, not 3"):
        torch.ops.ours.all_gather_into_tensor(tensor, 3, dist.group.WORLD.group_name)
    with pytest.raises(ValueError, match="cannot be cut into 0"):
        torch.ops.ours.reduce_scatter_tensor(torch.empty(3, device="meta"), "sum", 0, "")
    with pytest.raises(RuntimeError, match="nobody"):
        functional.all_reduce(tensor, "sum", "nobody")
    with pytest.raises(ValueError, match="'max' has no gradient here, but 'sum' and 'avg' have"):
        functional.all_reduce(tensor.requires_grad_(), "max").sum().backward()
    with pytest.raises(RuntimeError, match="functorch transforms"):
        torch.func.jvp(functional.all_reduce, (torch.ones(1),), (torch.ones(1),))
    strangers = dist.new_group([0])
    if rank == 1:
        with pytest.raises(ValueError, match="none that this rank is a member of"):
            functional.all_gather(tensor, group=strangers)
    assert functional.all_reduce(torch.ones(1)).item() == 2  # none of these has harmed the group


@pytest.mark.parametrize("name", ["rows", "root"])
@in_ranks(2, fresh=True)
def test_what_one_rank_does_wrong_all_hear_of(rank, world, name):
    call = {
        "rows": lambda: functional.reduce_scatter(torch.ones(4 - rank)),
        "root": lambda: functional.broadcast(torch.ones(2), 7 * rank),
    }[name]
    if rank == 1:
        with pytest.raises(ValueError, match=r"reduce_scatter|root"):
            call()
    else:  # at once, and not by the timeout
        with pytest.raises(dist.DistBackendError, match="since its own arguments have no meaning"):
            call()


@in_ranks(2, fresh=True)
def test_ranks_that_differ_all_hear_of_it(rank, world):
    with pytest.raises(dist.DistBackendError, match=r"all_reduce.* 3 x float32.* 4 x float32"):
        functional.all_reduce(torch.ones(3 + rank))
