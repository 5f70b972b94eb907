"""DistributedDataParallel: equal to one process, whatever the options."""

from __future__ import annotations

import copy
import inspect

import pytest
import torch
import torch.distributed as dist
from ddp_cases import (
    Mlp,
    assert_same,
    backward,
    batches,
    bitwise_equal_everywhere,
    check_uneven_join,
    gradients,
    make_model,
    reference_gradients,
    skip_sparse_over_gloo,
    train_and_compare,
)
from ranks import in_ranks
from torch import nn

from ourddp import DistributedDataParallel

OPTIONS = {
    "plain": {},
    "view": {"gradient_as_bucket_view": True},
    "unused": {"find_unused_parameters": True},
    "unused_view": {"find_unused_parameters": True, "gradient_as_bucket_view": True},
    "static": {"static_graph": True},
    "static_view": {"static_graph": True, "gradient_as_bucket_view": True},
    "tiny_buckets": {"bucket_cap_mb": 0.002},
    "bucket_list": {"bucket_cap_mb_list": [0.001, 0.004]},
}


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_gradients_equal_one_process(rank_pool, backend, world, options):
    rank_pool(world, backend).run(train_and_compare, "mlp", dict(options))


@pytest.mark.parametrize("model", ["cnn", "mixed", "sparse"])
@pytest.mark.parametrize("view", [False, True])
def test_models(rank_pool, backend, model, view):
    skip_sparse_over_gloo(backend, model)
    rank_pool(2, backend).run(train_and_compare, model, {"gradient_as_bucket_view": view})


@pytest.mark.parametrize("view", [False, True])
def test_gradients_that_are_zeroed_in_place(rank_pool, backend, view):
    rank_pool(2, backend).run(train_and_compare, "mlp", {"gradient_as_bucket_view": view}, 4, False)


@pytest.mark.parametrize("option", ["batched_grad_copy", "lazy_bucket_allocation"])
@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize("static", [False, True])
def test_options_of_newer_versions(rank_pool, option, view, static):
    if option not in inspect.signature(torch.nn.parallel.DistributedDataParallel).parameters:
        pytest.skip(f"this torch has no {option}")
    options = {option: True, "gradient_as_bucket_view": view, "static_graph": static, "bucket_cap_mb": 0.002}
    rank_pool(2, "gloo").run(train_and_compare, "mlp", options)


# --- accumulation ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [OPTIONS[k] for k in ("plain", "view", "unused", "unused_view", "static")])
@in_ranks(2, "backend")
def test_no_sync_accumulates(rank, world, options):
    steps = 6
    expected = reference_gradients("mlp", world, steps, lr=0.0)
    model = DistributedDataParallel(make_model("mlp"), **options)
    for start in range(0, steps, 3):
        model.zero_grad(set_to_none=True)
        for step, batch in list(enumerate(batches(world, steps)))[start : start + 3]:
            if step - start < 2:
                with model.no_sync():
                    backward(model, batch, rank)
                assert not bitwise_equal_everywhere(next(iter(model.parameters())).grad)
            else:
                backward(model, batch, rank)
        window = expected[start : start + 3]
        total = {key: sum(step[key] for step in window) for key in window[0]}
        assert_same(gradients(model), total, f"rank {rank} window {start}")


# --- averaging -------------------------------------------------------------------------------------------------------


@in_ranks(3, "backend")
def test_gradients_are_equal_bit_by_bit(rank, world):
    model = DistributedDataParallel(make_model("mlp"))
    for batch in batches(world, 2):
        backward(model, batch, rank)
    assert all(bitwise_equal_everywhere(parameter.grad) for parameter in model.parameters())


@in_ranks(2, "backend")
def test_averages_of_half_precision_do_not_overflow(rank, world):
    model = DistributedDataParallel(nn.Linear(4, 4, bias=False).half())
    # The sum over the ranks is beyond float16, their average is not.
    (model(torch.full((1, 4), 40000.0 / 4, dtype=torch.half)).float().sum() * 4).backward()
    torch.testing.assert_close(model.module.weight.grad, torch.full((4, 4), 40000.0, dtype=torch.half))


# --- the class -------------------------------------------------------------------------------------------------------


@in_ranks(2, "backend")
def test_it_is_torchs_class_with_another_reducer(rank, world):
    model = DistributedDataParallel(Mlp())
    assert isinstance(model, torch.nn.parallel.DistributedDataParallel)
    assert type(model.reducer).__module__.startswith("ourddp")
    assert model._get_ddp_logging_data()["module_name"] == "Mlp"
    with pytest.raises(RuntimeError, match="only be called once"):
        for _ in range(2):
            model.register_comm_hook(None, lambda state, bucket: None)


@pytest.mark.parametrize("whole", [True, False])
@in_ranks(2, "backend")
def test_join_with_uneven_inputs(rank, world, whole):
    check_uneven_join(rank, whole)


@in_ranks(2, "backend")
def test_the_process_group_can_be_replaced(rank, world):
    model = DistributedDataParallel(nn.Linear(2, 1, bias=False))
    for _ in range(2):
        model(torch.full((1, 2), 1.0 + rank)).sum().backward()
    alone = [dist.new_group([each]) for each in range(world)]
    model._update_process_group(alone[rank])
    for _ in range(2):
        model.zero_grad()
        model(torch.full((1, 2), 1.0 + rank)).sum().backward()
    assert model.module.weight.grad.tolist() == [[1.0 + rank] * 2]


class Between(nn.Module):
    """Calls ``between()`` in backward, after the last layer's gradient and before the first one's."""

    def __init__(self):
        super().__init__()
        self.first, self.last = (nn.Linear(2, 2, bias=False) for _ in range(2))

    def forward(self, x):
        hidden = self.first(x)
        hidden.register_hook(lambda gradient: self.between())
        return self.last(hidden)


def trip():
    raise ArithmeticError("tripped")


@pytest.mark.parametrize("view", [False, True])
@in_ranks(2, "backend", fresh=True)
def test_a_reduction_that_a_failed_backward_left_changes_no_later_gradients(rank, world, view):
    store = dist.distributed_c10d._get_default_store()
    model = DistributedDataParallel(Between(), bucket_cap_mb=1e-6, gradient_as_bucket_view=view)
    model.module.between = lambda: None
    for _ in range(2):  # from the second step on, each layer has a bucket of its own
        model(torch.ones(1, 2)).sum().backward()
    if rank == 1:
        store.wait(["began again"])
    model.module.between = trip
    with pytest.raises(ArithmeticError):
        model(torch.full((1, 2), 100.0)).sum().backward()
    assert model.reducer._get_status().bucket_indices == [[1], [0]]
    model._update_process_group(dist.group.WORLD)  # forgets the backward that did not end
    model.zero_grad()
    model.module.between = lambda: store.set("began again", "")
    inputs = torch.tensor([1.0, 2.0])
    model(inputs[rank].expand(1, 2)).sum().backward()
    alone = copy.deepcopy(model.module)
    alone.zero_grad()
    alone(inputs.view(2, 1).expand(2, 2)).sum().div(2).backward()
    for mine, expected in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, expected.grad)
