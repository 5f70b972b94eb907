"""A model that goes on over other ranks: what it makes anew, and what stays."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import in_ranks
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel.distributed import _MixedPrecision

from ourddp import DistributedDataParallel


def gradient(model: nn.Module, inputs: float) -> list[float]:
    """Return the gradient of a linear layer, which is the mean of all ranks' inputs."""
    model.zero_grad()
    model(torch.full((1, 2), float(inputs))).sum().backward()
    return model.module.weight.grad.flatten().tolist()


def linear(seed: int = 0) -> nn.Linear:
    torch.manual_seed(seed)
    return nn.Linear(2, 1)


@pytest.mark.parametrize(
    "how", [{}, {"gradient_as_bucket_view": True}, {"static_graph": True}, {"bucket_cap_mb": "auto"}]
)
@in_ranks(3, "backend")
def test_gradients_are_averaged_over_the_new_ranks(rank: int, world: int, how: dict[str, Any]) -> None:
    model = DistributedDataParallel(linear(), **how)
    module, parameters = model.module, list(model.parameters())
    model.eval()
    for _ in range(3):
        assert gradient(model, rank) == pytest.approx([1.0] * 2)
    model(torch.ones(1, 2)).sum()  # a backward that has not come
    groups = [dist.new_group([0]), dist.new_group([1, 2])]
    model.change_group(groups[rank > 0])
    assert not model.training
    assert model.module is module
    assert all(one is other for one, other in zip(model.parameters(), parameters, strict=True))
    for _ in range(3):
        assert gradient(model, rank) == pytest.approx([0.0 if rank == 0 else 1.5] * 2)
    model.change_group(init_sync=False)
    for _ in range(3):
        assert gradient(model, rank) == pytest.approx([1.0] * 2)


@in_ranks(2)
def test_all_ranks_get_what_rank_0_has_unless_that_is_left_out(rank: int, world: int) -> None:
    model = DistributedDataParallel(linear(rank), init_sync=False)
    own = model.module.weight.detach().clone()
    model.change_group(init_sync=False)
    assert torch.equal(model.module.weight, own)
    model.change_group()
    assert torch.equal(model.module.weight, linear(0).weight)


@in_ranks(2)
def test_a_newcomer_makes_a_model_while_the_others_change_theirs(rank: int, world: int) -> None:
    """The others have had their buckets rebuilt already."""
    layers = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1)) if rank == 0 else None
    alone = [dist.new_group([each]) for each in range(world)]
    if rank == 0:
        model = DistributedDataParallel(layers, process_group=alone[0], bucket_cap_mb=1e-5)
        for _ in range(3):
            model(torch.ones(1, 2)).sum().backward()
        model.change_group()
    else:
        model = DistributedDataParallel(nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1)), bucket_cap_mb=1e-5)
    for _ in range(3):
        model.zero_grad()
        model(torch.full((1, 2), float(rank))).sum().backward()
        gradients = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
        dist.broadcast(others := gradients.clone(), 0)
        assert torch.equal(gradients, others)


@in_ranks(2)
def test_communication_hooks_stay(rank: int, world: int) -> None:
    calls: list[int] = []

    def hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        calls.append(bucket.index())
        return allreduce_hook(state, bucket)

    model = DistributedDataParallel(linear())
    model.register_comm_hook(None, hook)
    model.change_group()
    assert gradient(model, rank) == [0.5] * 2
    assert calls == [0]
    model.change_group()
    assert gradient(model, rank) == [0.5] * 2
    assert calls == [0, 0]
    with pytest.raises(RuntimeError, match="hook"):
        model.register_comm_hook(None, hook)
    built_in = DistributedDataParallel(linear())
    built_in._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
    built_in.change_group()
    assert gradient(built_in, rank + 2**-14) == [0.5] * 2  # rounded to float16
    with pytest.raises(RuntimeError, match="hook"):
        built_in.register_comm_hook(None, hook)


@in_ranks(2)
def test_hooks_of_the_module_stay(rank: int, world: int) -> None:
    model = DistributedDataParallel(linear())
    calls: list[str] = []
    model.register_forward_pre_hook(lambda *_: calls.append("before"))
    handle = model.register_forward_hook(lambda *_: calls.append("after"))
    model.register_full_backward_hook(lambda *_: calls.append("backward"))
    model.register_state_dict_post_hook(lambda *_: calls.append("state"))
    model.change_group()
    gradient(model, rank)
    model.state_dict()
    assert calls == ["before", "after", "backward", "state"]
    handle.remove()
    model.change_group()
    gradient(model, rank)
    assert calls[4:] == ["before", "backward"]


@in_ranks(2)
def test_after_a_failure_a_model_can_change_its_group_again(rank: int, world: int) -> None:
    model = DistributedDataParallel(linear())
    gradient(model, rank)
    alone = [dist.new_group([each]) for each in range(world)]
    bias = model.module.bias
    if rank == 1:
        model.module.bias = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    with pytest.raises(RuntimeError, match="bias"):
        model.change_group()
    model.module.bias = bias
    model.change_group(alone[rank])
    assert gradient(model, rank) == [float(rank)] * 2


@in_ranks(1)
def test_mixed_precision_is_refused(rank: int, world: int) -> None:
    model = DistributedDataParallel(linear(), mixed_precision=_MixedPrecision(param_dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="make a new one of its module"):
        model.change_group()


@in_ranks(2)
def test_what_is_done_about_bad_gradients_stays(rank: int, world: int) -> None:
    model = DistributedDataParallel(linear(), bad_gradients="raise")
    model.change_group()
    with pytest.raises(RuntimeError, match="rank 1 in"):
        model(torch.full((1, 2), float("nan") if rank == 1 else 1.0)).sum().backward()


@in_ranks(2)
def test_old_and_new_ranks_check_replicas_at_the_same_forwards(rank: int, world: int) -> None:
    alone = [dist.new_group([each]) for each in range(world)]
    if rank == 0:
        model = DistributedDataParallel(linear(), process_group=alone[0], check_replicas_every=3)
        for _ in range(2):
            model(torch.ones(1, 2))
        model.change_group()
    else:
        model = DistributedDataParallel(linear(), check_replicas_every=3)
    with torch.no_grad():
        model.module.bias[0] = rank
    for _ in range(2):
        model(torch.ones(1, 2)).sum().backward()
    with pytest.raises(RuntimeError, match="replicas of the model differ"):
        model(torch.ones(1, 2))
