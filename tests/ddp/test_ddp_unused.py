"""Parameters that take no part, graphs that change or do not, and checkpointing."""

from __future__ import annotations

import pytest
import torch
from ddp_cases import (
    Branches,
    Checkpointed,
    assert_same,
    backward,
    batches,
    bitwise_equal_everywhere,
    gradients,
    loss_of,
    make_model,
    reference_gradients,
    train_and_compare,
)
from ranks import in_ranks
from torch import nn

from ourddp import DistributedDataParallel


def _error(rank, model, steps=2):
    """The error of the first step that fails, and its index."""
    for step in range(steps):
        try:
            loss_of(model(torch.full((2, 8), rank + 1.0))).backward()
        except RuntimeError as error:
            return step, str(error)
    return None


# --- unused parameters -----------------------------------------------------------------------------------------------


@in_ranks(2, "backend")
def test_unused_parameters_are_named(rank, world):
    step, message = _error(rank, DistributedDataParallel(Branches()))
    assert step == 1
    assert f"did not receive grad for rank {rank}: 4 5 6 7" in message
    assert "right.weight, right.bias, never.weight, never.bias" in message
    assert "find_unused_parameters=True" in message


@in_ranks(2, "backend")
def test_an_unfinished_reduction_can_be_asked_for(rank, world):
    class TwoOutputs(nn.Module):
        def __init__(self):
            super().__init__()
            self.one = nn.Linear(8, 3)
            self.two = nn.Linear(8, 3)

        def forward(self, x):
            # In a structure that nothing can look into, so that the search finds neither.
            return {"one": self.one(x), "hidden": lambda: self.two(x)}

    model = DistributedDataParallel(TwoOutputs())
    model(torch.ones(2, 8))["one"].sum().backward()
    with pytest.raises(RuntimeError, match=r"two\.weight, two\.bias"):
        model._check_reducer_finalized()


@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True}, {"bucket_cap_mb": 0.0002}])
def test_unused_parameters_are_found(rank_pool, backend, options):
    results = rank_pool(2, backend).run(train_and_compare, "branches", {"find_unused_parameters": True, **options})
    assert results[0]["logged"]["unused_parameter_size"] == 2 * 4 * (8 * 3 + 3)


@pytest.mark.parametrize("view", [False, True])
@in_ranks(2, "backend")
def test_ranks_may_use_different_parameters(rank, world, view):
    model = DistributedDataParallel(Branches(), find_unused_parameters=True, gradient_as_bucket_view=view)
    model.module.use = "left" if rank == 0 else "right"
    model(torch.ones(2, 8)).sum().backward()
    # Used by one of two ranks: half its gradient everywhere. Used by none: untouched.
    for layer in (model.module.left, model.module.right):
        torch.testing.assert_close(layer.bias.grad, torch.ones(3))
    assert model.module.never.weight.grad is None
    kept = torch.full((3, 8), 5.0 + rank)
    model.module.never.weight.grad = kept.clone()
    model(torch.ones(2, 8)).sum().backward()
    assert torch.equal(model.module.never.weight.grad, kept)
    assert model.reducer._ddp_graph_static()


@in_ranks(2, "backend")
def test_a_graph_that_changes_is_noticed(rank, world):
    model = DistributedDataParallel(Branches(), find_unused_parameters=True)
    for use, static in (("left", True), ("left", True), ("right", False)):
        model.zero_grad()
        model.module.use = use
        model(torch.ones(2, 8)).sum().backward()
        assert (model.module.left.weight.grad is None) == (use == "right")
        assert model.reducer._ddp_graph_static() == static


@in_ranks(2, "backend")
def test_an_output_that_the_loss_does_not_use(rank, world):
    class TwoOutputs(nn.Module):
        def __init__(self):
            super().__init__()
            self.one = nn.Linear(8, 3)
            self.two = nn.Linear(8, 3)

        def forward(self, x):
            return self.one(x), self.two(x)

    model = DistributedDataParallel(TwoOutputs(), find_unused_parameters=True)
    for _ in range(3):
        model(torch.ones(2, 8))[0].sum().backward()
    # Reached by the outputs, but not by the loss: undefined gradients, which leave .grad alone.
    assert model.module.two.weight.grad is None
    torch.testing.assert_close(model.module.one.bias.grad, torch.full((3,), 6.0))


@in_ranks(3, "backend")
def test_unused_parameters_of_uneven_inputs(rank, world):
    model = DistributedDataParallel(make_model("branches"), find_unused_parameters=True)
    with model.join():
        for step in range(1 + rank):
            model.zero_grad()
            model.module.use = "left" if step == 0 else "right"
            model(torch.ones(2, 8)).sum().backward()
            # The ranks that have run out of input do not use anything.
            assert (model.module.left.weight.grad is None) == (step > 0)
    assert all(bitwise_equal_everywhere(parameter.detach()) for parameter in model.parameters())


# --- static graphs ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["mlp", "branches", "checkpoint", "reentrant", "checkpoint_twice", "reentrant_twice"])
@pytest.mark.parametrize("view", [False, True])
def test_static_graph(rank_pool, backend, model, view):
    rank_pool(2, backend).run(train_and_compare, model, {"static_graph": True, "gradient_as_bucket_view": view})


@in_ranks(2, "backend")
def test_a_static_graph_that_changes_is_refused(rank, world):
    model = DistributedDataParallel(Branches(), static_graph=True)
    loss_of(model(torch.ones(2, 8))).backward()
    model.module.use = "right"
    step, message = _error(rank, model)
    assert model._get_ddp_logging_data()["has_error"] == 1
    assert step == 0
    assert "Your training graph has changed in this iteration" in message
    assert "right." in message


@in_ranks(2, "backend")
def test_the_first_reduction_is_what_counts_for_a_static_graph(rank, world):
    expected = reference_gradients("branches", world, 3, lr=0.0)
    model = DistributedDataParallel(make_model("branches"), static_graph=True)
    for step, batch in enumerate(batches(world, 3)):
        if step == 0:
            with model.no_sync():
                backward(model, batch, rank)
            model.zero_grad()
        else:
            model.zero_grad()
            backward(model, batch, rank)
            assert_same(gradients(model), expected[step], f"rank {rank} step {step}")


# --- checkpointing ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True}, {"bucket_cap_mb": 0.0002}])
@pytest.mark.parametrize("model", ["checkpoint", "reentrant", "checkpoint_twice"])
def test_checkpointing(rank_pool, backend, model, options):
    rank_pool(2, backend).run(train_and_compare, model, options)


@in_ranks(2, "backend")
def test_a_parameter_that_is_ready_twice_is_named(rank, world):
    step, message = _error(rank, DistributedDataParallel(Checkpointed(reentrant=True, times=2)), steps=1)
    assert step == 0
    assert "marked as ready twice" in message
    assert "middle." in message
    assert "use_reentrant=False" in message


# --- other gradients -------------------------------------------------------------------------------------------------


@in_ranks(2)
def test_a_sparse_gradient_that_only_one_rank_has(rank, world):
    class Optional(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(4, 2, sparse=True)
            self.head = nn.Linear(2, 1)

        def forward(self, x):
            return self.head(self.table(x) if rank == 0 else torch.ones(len(x), 2))

    model = DistributedDataParallel(Optional(), find_unused_parameters=True)
    nn.init.ones_(model.module.head.weight)
    for _ in range(2):
        model.zero_grad()
        model(torch.tensor([1, 1, 3])).sum().backward()
        expected = torch.tensor([[0.0, 0], [1, 1], [0, 0], [0.5, 0.5]])
        torch.testing.assert_close(model.module.table.weight.grad.to_dense(), expected)
