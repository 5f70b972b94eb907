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
    gradients,
    loss_of,
    make_model,
    reference_gradients,
    share,
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


def _unfinished(rank, world, options):
    return _error(rank, DistributedDataParallel(Branches(), **options))


def test_unused_parameters_are_named(rank_pool, backend):
    for rank, found in enumerate(rank_pool(2, backend).run(_unfinished, {})):
        step, message = found
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


def _branch_by_rank(rank, world, view):
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
    return model.reducer._ddp_graph_static()


@pytest.mark.parametrize("view", [False, True])
def test_ranks_may_use_different_parameters(rank_pool, backend, view):
    assert rank_pool(2, backend).run(_branch_by_rank, view) == [True, True]


def _changing_branch(rank, world):
    model = DistributedDataParallel(Branches(), find_unused_parameters=True)
    static = []
    for use in ("left", "left", "right"):
        model.zero_grad()
        model.module.use = use
        model(torch.ones(2, 8)).sum().backward()
        assert (model.module.left.weight.grad is None) == (use == "right")
        static.append(model.reducer._ddp_graph_static())
    return static


def test_a_graph_that_changes_is_noticed(rank_pool, backend):
    assert rank_pool(2, backend).run(_changing_branch) == [[True, True, False]] * 2


@pytest.mark.parametrize("view", [False, True])
@in_ranks(2, "backend")
def test_used_means_used_since_the_last_reduction(rank, world, view):
    model = DistributedDataParallel(make_model("branches"), find_unused_parameters=True, gradient_as_bucket_view=view)
    alone = make_model("branches")
    shares = [list(batches(world, 3))[step] for step in range(3)]
    uses = ("left", "right", "left")
    for step, use in enumerate(uses):
        model.module.use = alone.use = use
        for other in range(world):
            (loss_of(alone(share(shares[step], other))) / world).backward()
        if step < 2:
            with model.no_sync():
                backward(model, shares[step], rank)
        else:
            # This step does not use `right`, but the window does: its gradient must not be taken for nothing.
            backward(model, shares[step], rank)
    assert_same(gradients(model), gradients(alone), f"rank {rank}")


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


def _skipped(rank, world):
    model = DistributedDataParallel(
        Branches(), find_unused_parameters=True, skip_all_reduce_unused_params=True, bucket_cap_mb=0.0001
    )
    for _ in range(2):
        model(torch.ones(2, 8)).sum().backward()
    times = model.reducer._get_backward_times()
    return [-1 if bucket.reduction_began < 0 else 1 for bucket in times.buckets], times.parameters


def test_buckets_of_unused_parameters_can_be_skipped(rank_pool, backend):
    (began, buckets), _ = rank_pool(2, backend).run(_skipped)
    for reduced, bucket in zip(began, buckets, strict=True):
        assert (reduced > 0) == any(index < 4 for index in bucket), (bucket, reduced)
    assert -1 in began


def _join(rank, world):
    model = DistributedDataParallel(make_model("branches"), find_unused_parameters=True)
    with model.join():
        for step in range(1 + rank):
            model.zero_grad()
            model.module.use = "left" if step == 0 else "right"
            model(torch.ones(2, 8)).sum().backward()
            # The ranks that have run out of input do not use anything.
            assert (model.module.left.weight.grad is None) == (step > 0)
    return [parameter.tolist() for parameter in model.parameters()]


def test_unused_parameters_of_uneven_inputs(rank_pool, backend):
    first, *others = rank_pool(3, backend).run(_join)
    assert all(other == first for other in others)


# --- static graphs ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["mlp", "branches", "checkpoint", "reentrant", "checkpoint_twice", "reentrant_twice"])
@pytest.mark.parametrize("view", [False, True])
def test_static_graph(rank_pool, backend, model, view):
    rank_pool(2, backend).run(train_and_compare, model, {"static_graph": True, "gradient_as_bucket_view": view})


def _changed_after_the_first(rank, world):
    model = DistributedDataParallel(Branches(), static_graph=True)
    loss_of(model(torch.ones(2, 8))).backward()
    model.module.use = "right"
    found = _error(rank, model)
    assert model._get_ddp_logging_data()["has_error"] == 1
    return found


def test_a_static_graph_that_changes_is_refused(rank_pool, backend):
    for step, message in rank_pool(2, backend).run(_changed_after_the_first):
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


@pytest.mark.parametrize("model", ["checkpoint", "reentrant"])
@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True}, {"bucket_cap_mb": 0.0002}])
def test_checkpointing(rank_pool, backend, model, options):
    rank_pool(2, backend).run(train_and_compare, model, options)


def test_checkpointing_a_layer_twice_without_reentrance(rank_pool, backend):
    rank_pool(2, backend).run(train_and_compare, "checkpoint_twice", {})


def _reentrant_twice(rank, world):
    return _error(rank, DistributedDataParallel(Checkpointed(reentrant=True, times=2)), steps=1)


def test_a_parameter_that_is_ready_twice_is_named(rank_pool, backend):
    for step, message in rank_pool(2, backend).run(_reentrant_twice):
        assert step == 0
        assert "marked as ready twice" in message
        assert "middle." in message
        assert "use_reentrant=False" in message


# --- other gradients -------------------------------------------------------------------------------------------------


@in_ranks(2, "backend")
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


@in_ranks(2, "backend")
def test_gradients_of_gradients_can_be_kept(rank, world):
    model = DistributedDataParallel(nn.Linear(8, 1, bias=False))
    out = model(torch.full((1, 8), rank + 1.0))
    out.square().sum().backward(create_graph=True)
    local = (rank + 1.0) * 2 * out.detach()
    others = [(r + 1.0) * 2 * ((r + 1.0) * model.module.weight.detach().sum()) for r in range(world)]
    assert local.isfinite().all()
    expected = torch.full((1, 8), float(sum(others)) / world)
    torch.testing.assert_close(model.module.weight.grad.detach(), expected)
