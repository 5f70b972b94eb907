"""Steps of DistributedDataParallel that fail in the end of backward, and the steps after them."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from ranks import in_ranks
from torch import nn

from ourddp import DistributedDataParallel


def model_of(rank: int, **options: object) -> DistributedDataParallel:
    torch.manual_seed(0)
    return DistributedDataParallel(nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)), **options)


def check_a_good_step(model: DistributedDataParallel, rank: int, world: int) -> None:
    """One backward; the gradients must be the average over all ranks' inputs."""
    model.zero_grad()
    model(torch.full((2, 4), float(rank))).sum().backward()
    expected = None
    for r in range(world):
        grads = torch.autograd.grad(model.module(torch.full((2, 4), float(r))).sum(), list(model.parameters()))
        expected = list(grads) if expected is None else [a + b for a, b in zip(expected, grads, strict=True)]
    assert expected is not None
    for parameter, total in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, total / world)


@in_ranks(2)
def test_an_installed_future_that_fails_does_not_fail_the_next_backward(rank: int, world: int) -> None:
    model = model_of(rank)
    good: torch.futures.Future[torch.Tensor] = torch.futures.Future()

    def fail(_: torch.futures.Future) -> None:
        raise ValueError("from an installed future")

    broken = good.then(fail)
    good.set_result(torch.ones(1))
    model.reducer._install_post_backward_futures([broken])
    with pytest.raises(Exception, match="from an installed future"):
        model(torch.ones(2, 4)).sum().backward()
    check_a_good_step(model, rank, world)


@in_ranks(2)
def test_steps_after_a_failed_hook_are_right(rank: int, world: int) -> None:
    buckets: list[int] = []
    fail_at_bucket = -1

    def hook(_: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        buckets.append(bucket.index())
        fails = bucket.index() == fail_at_bucket
        buffer = bucket.buffer().div_(world)

        def after(future: torch.futures.Future) -> torch.Tensor:
            if fails:
                raise ValueError("from a hook")
            return future.value()[0]

        return dist.all_reduce(buffer, async_op=True).get_future().then(after)

    # A bucket for each parameter, from the second step on.
    model = model_of(rank, bucket_cap_mb=0.00001)
    model.register_comm_hook(None, hook)
    for _ in range(2):
        buckets.clear()
        check_a_good_step(model, rank, world)
    assert len(buckets) > 1
    fail_at_bucket = 0
    with pytest.raises(Exception, match="from a hook"):
        model(torch.ones(2, 4)).sum().backward()
    fail_at_bucket = -1
    for _ in range(3):
        check_a_good_step(model, rank, world)
