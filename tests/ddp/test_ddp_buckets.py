"""Buckets: which gradients they hold, when they are reduced, and what memory the gradients have."""

from __future__ import annotations

import pytest
import torch
from ddp_cases import (
    assert_same,
    backward,
    batches,
    gradients,
    make_model,
    reference_gradients,
    train_and_compare,
)
from ranks import in_ranks
from torch import nn

from ourddp import DistributedDataParallel


def test_buckets_are_rebuilt_in_arrival_order(rank_pool, backend):
    result = rank_pool(2, backend).run(train_and_compare, "mlp", {"bucket_cap_mb": 0.002})
    assert result[0]["buckets"] == result[1]["buckets"]
    order = [index for bucket in result[0]["buckets"] for index in bucket]
    assert len(result[0]["buckets"]) > 2
    # Autograd reaches the last layer first.
    assert set(order[:2]) == {6, 7}
    assert set(order[-2:]) == {0, 1}
    assert result[0]["logged"]["has_rebuilt_buckets"] == 1


def _used_in_another_order(rank, world):
    class Backwards(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

        def forward(self, x):
            # Rank 0 alone runs the layers the other way round, so it alone sees the gradients in ascending order.
            for layer in reversed(self.layers) if rank == 0 else self.layers:
                x = layer(x)
            return x

    model = DistributedDataParallel(Backwards(), bucket_cap_mb=0.0001)
    for _ in range(3):
        model(torch.ones(2, 8)).sum().backward()
    return model.reducer._get_backward_times().parameters


def test_rank_0_decides_on_the_buckets(rank_pool, backend):
    buckets = rank_pool(3, backend).run(_used_in_another_order)
    assert buckets[0] == buckets[1] == buckets[2]
    assert sorted(index for bucket in buckets[0] for index in bucket) == list(range(8))
    assert set(buckets[0][0]) <= {0, 1}
    assert set(buckets[0][-1]) <= {6, 7}


@pytest.mark.parametrize("view", [False, True])
@in_ranks(2, "backend")
def test_a_rebuild_loses_no_gradient(rank, world, view):
    expected = reference_gradients("mlp", world, 3, lr=0.0)
    total = {name: sum(step[name] for step in expected) for name in expected[0]}
    model = DistributedDataParallel(make_model("mlp"), bucket_cap_mb=0.002, gradient_as_bucket_view=view)
    for step, batch in enumerate(batches(world, 3)):
        # The first of these backwards reduces into the first buckets, the next into the rebuilt ones.
        if step == 1:
            with model.no_sync():
                backward(model, batch, rank)
        else:
            backward(model, batch, rank)
    # Each reduction averages what has been accumulated, and what is equal everywhere stays what it is.
    assert_same(gradients(model), total, f"rank {rank}")


@pytest.mark.parametrize("view", [False, True])
@in_ranks(2, "backend")
def test_gradients_have_the_parameters_strides(rank, world, view):
    model = DistributedDataParallel(make_model("cnn"), gradient_as_bucket_view=view)
    kept = []
    for batch in batches(world, 2):
        model.zero_grad(set_to_none=True)
        backward(model, batch, rank)
        kept.append([p.grad for p in model.parameters()])
    for parameter in model.parameters():
        assert parameter.grad.stride() == parameter.stride()
    weight = model.module.conv.weight
    assert weight.grad.is_contiguous(memory_format=torch.channels_last)
    storages = {p.grad.untyped_storage().data_ptr() for p in model.parameters()}
    assert (len(storages) == 1) == view
