"""DistributedDataParallel: equal to one process, whatever the options."""

from __future__ import annotations

import copy
import inspect
import pickle
import re

import pytest
import torch
import torch.distributed as dist
from ddp_cases import (
    Mlp,
    assert_same,
    batches,
    bitwise_equal_everywhere,
    gradients,
    loss_of,
    make_model,
    reference_gradients,
    share,
    train_and_compare,
)
from torch import nn

from ourddp import DistributedDataParallel

BACKENDS = ["gloo", "ours"]


@pytest.fixture(params=BACKENDS)
def backend(request):
    return request.param


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


@pytest.mark.parametrize("model", ["cnn", "mixed", "sparse", "checkpoint"])
@pytest.mark.parametrize("view", [False, True])
def test_models(rank_pool, backend, model, view):
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


# --- buckets ---------------------------------------------------------------------------------------------------------


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
    return model.reducer._get_bucket_indices()


def test_rank_0_decides_on_the_buckets(rank_pool, backend):
    buckets = rank_pool(3, backend).run(_used_in_another_order)
    assert buckets[0] == buckets[1] == buckets[2]
    assert sorted(index for bucket in buckets[0] for index in bucket) == list(range(8))
    assert set(buckets[0][0]) <= {0, 1}
    assert set(buckets[0][-1]) <= {6, 7}


def _rebuild_while_accumulating(rank, world, view):
    expected = reference_gradients("mlp", world, 3, lr=0.0)
    total = {name: sum(step[name] for step in expected) for name in expected[0]}
    model = DistributedDataParallel(make_model("mlp"), bucket_cap_mb=0.002, gradient_as_bucket_view=view)
    for step, batch in enumerate(batches(world, 3)):
        # The first of these backwards reduces into the first buckets, the next into the rebuilt ones.
        if step == 1:
            with model.no_sync():
                loss_of(model(share(batch, rank))).backward()
        else:
            loss_of(model(share(batch, rank))).backward()
    # Each reduction averages what has been accumulated, and what is equal everywhere stays what it is.
    assert_same(gradients(model), total, f"rank {rank}")


@pytest.mark.parametrize("view", [False, True])
def test_a_rebuild_loses_no_gradient(rank_pool, backend, view):
    rank_pool(2, backend).run(_rebuild_while_accumulating, view)


def _layout(rank, world, view):
    model = DistributedDataParallel(make_model("cnn"), gradient_as_bucket_view=view)
    kept = []
    for batch in batches(world, 2):
        model.zero_grad(set_to_none=True)
        loss_of(model(share(batch, rank))).backward()
        kept.append([p.grad for p in model.parameters()])
    for parameter in model.parameters():
        assert parameter.grad.stride() == parameter.stride()
    weight = model.module.conv.weight
    assert weight.grad.is_contiguous(memory_format=torch.channels_last)
    storages = {p.grad.untyped_storage().data_ptr() for p in model.parameters()}
    assert (len(storages) == 1) == view


@pytest.mark.parametrize("view", [False, True])
def test_gradients_have_the_parameters_strides(rank_pool, backend, view):
    rank_pool(2, backend).run(_layout, view)


def _overlap(rank, world):
    model = DistributedDataParallel(make_model("mlp"), bucket_cap_mb=0.002)
    for batch in batches(world, 3):
        loss_of(model(share(batch, rank))).backward()
    times = model.reducer._get_bucket_times()
    assert len(times) > 2
    for bucket in times:
        assert 0 < bucket.first_gradient <= bucket.last_gradient <= bucket.reduction_began <= bucket.reduction_seen_done
        assert 0 <= bucket.waited <= bucket.reduction_seen_done - bucket.reduction_began
    # The first bucket is under way before the last gradient exists.
    assert times[0].reduction_began < times[-1].last_gradient
    assert [bucket.reduction_began for bucket in times] == sorted(bucket.reduction_began for bucket in times)


def test_reductions_start_during_backward_in_bucket_order(rank_pool, backend):
    rank_pool(2, backend).run(_overlap)


# --- accumulation ----------------------------------------------------------------------------------------------------


def _accumulate(rank, world, options, name="mlp"):
    steps = 6
    expected = reference_gradients(name, world, steps, lr=0.0)
    model = DistributedDataParallel(make_model(name), **options)
    for start in range(0, steps, 3):
        model.zero_grad(set_to_none=True)
        for step, batch in list(enumerate(batches(world, steps)))[start : start + 3]:
            if step - start < 2:
                with model.no_sync():
                    loss_of(model(share(batch, rank))).backward()
                local = next(iter(model.parameters())).grad
                assert world == 1 or not bitwise_equal_everywhere(local)
            else:
                loss_of(model(share(batch, rank))).backward()
        window = expected[start : start + 3]
        total = {key: sum(step[key] for step in window) for key in window[0]}
        assert_same(gradients(model), total, f"rank {rank} window {start}")


@pytest.mark.parametrize("options", [OPTIONS[k] for k in ("plain", "view", "unused", "unused_view", "static")])
def test_no_sync_accumulates(rank_pool, backend, options):
    rank_pool(2, backend).run(_accumulate, dict(options))


def _two_forwards(rank, world):
    expected = reference_gradients("mlp", world, 2, lr=0.0)
    model = DistributedDataParallel(make_model("mlp"))
    losses = [loss_of(model(share(batch, rank))) for batch in batches(world, 2)]
    sum(losses).backward()
    assert_same(gradients(model), {k: expected[0][k] + expected[1][k] for k in expected[0]}, f"rank {rank}")


def test_two_forwards_before_one_backward(rank_pool, backend):
    rank_pool(2, backend).run(_two_forwards)


# --- averaging -------------------------------------------------------------------------------------------------------


def _same_bits(rank, world, options):
    model = DistributedDataParallel(make_model("mlp"), **options)
    for batch in batches(world, 2):
        loss_of(model(share(batch, rank))).backward()
    assert all(bitwise_equal_everywhere(parameter.grad) for parameter in model.parameters())


def test_gradients_are_equal_bit_by_bit(rank_pool, backend):
    rank_pool(3, backend).run(_same_bits, {})


def _large_halves(rank, world):
    model = DistributedDataParallel(nn.Linear(4, 4, bias=False).half())
    # The sum over the ranks is beyond float16, their average is not.
    (model(torch.full((1, 4), 40000.0 / 4, dtype=torch.half)).float().sum() * 4).backward()
    torch.testing.assert_close(model.module.weight.grad, torch.full((4, 4), 40000.0, dtype=torch.half))


def test_averages_of_half_precision_do_not_overflow(rank_pool, backend):
    rank_pool(2, backend).run(_large_halves)


# --- parameters and buffers ------------------------------------------------------------------------------------------


def _initial_state(rank, world, options):
    torch.manual_seed(rank)
    module = nn.Sequential(nn.Linear(8, 3), nn.BatchNorm1d(3))
    module[1].running_mean.fill_(rank)
    model = DistributedDataParallel(module, **options)
    return [value.clone() for value in model.state_dict().values()]


def test_rank_0s_parameters_and_buffers_are_taken(rank_pool, backend):
    first, *others = rank_pool(3, backend).run(_initial_state, {})
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


def test_init_sync_can_be_left_out(rank_pool):
    first, second = rank_pool(2, "gloo").run(_initial_state, {"init_sync": False})
    assert not torch.equal(first[0], second[0])


def _buffers(rank, world, broadcast):
    module = nn.Sequential(nn.Linear(8, 3), nn.BatchNorm1d(3))
    model = DistributedDataParallel(module, broadcast_buffers=broadcast)
    for batch in batches(world, 3):
        model(share(batch, rank)).sum().backward()
    model.eval()
    model(torch.zeros(1, 8))  # takes the buffers of rank 0 as they were after its last step
    return module[1].running_mean.clone()


@pytest.mark.parametrize("broadcast", [True, False])
def test_buffers_follow_rank_0_if_asked(rank_pool, backend, broadcast):
    means = rank_pool(2, backend).run(_buffers, broadcast)
    assert torch.equal(*means) == broadcast


def _ignored(rank, world):
    module = nn.Sequential(nn.Linear(8, 3), nn.Linear(3, 3))
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ["1.weight"])
    model = DistributedDataParallel(module)
    model(torch.full((1, 8), rank + 1.0)).sum().backward()
    return bitwise_equal_everywhere(module[0].weight.grad), bitwise_equal_everywhere(module[1].weight.grad)


def test_ignored_parameters_stay_local(rank_pool, backend):
    assert rank_pool(2, backend).run(_ignored) == [(True, False)] * 2


def _build_different(rank, world, kind):
    module = nn.Sequential(nn.Linear(8, 3), nn.Linear(3, 5 if kind == "shape" and rank == 1 else 4))
    if kind == "count" and rank == 1:
        module.append(nn.Linear(4, 2))
    if kind == "dtype" and rank == 1:
        module[1].double()
    try:
        DistributedDataParallel(module)
    except RuntimeError as error:
        return str(error)
    return "accepted"


DIFFERENCES = {
    "shape": [r"1\.weight", r"Float \[4, 3\] on rank 0", r"Float \[5, 3\] on rank 1"],
    "dtype": [r"1\.weight", r"Float \[4, 3\] on rank 0", r"Double \[4, 3\] on rank 1"],
    "count": [r"rank 0 has 4 params, while rank 1 has 6", r"2\.weight"],
}


@pytest.mark.parametrize("kind", DIFFERENCES)
def test_models_that_differ_are_refused_everywhere(rank_pool, backend, kind):
    messages = rank_pool(3, backend).run(_build_different, kind)
    assert len(set(messages)) == 1
    for pattern in DIFFERENCES[kind]:
        assert re.search(pattern, messages[0]), messages[0]


# --- the class -------------------------------------------------------------------------------------------------------


def _wraps_like_torch(rank, world):
    model = DistributedDataParallel(Mlp())
    assert isinstance(model, torch.nn.parallel.DistributedDataParallel)
    assert type(model.reducer).__module__.startswith("ourddp")
    assert model._get_ddp_logging_data()["module_name"] == "Mlp"
    clone = pickle.loads(pickle.dumps(model))
    deep = copy.deepcopy(model)
    for batch in batches(world, 2):
        for each in (model, clone, deep):
            loss_of(each(share(batch, rank))).backward()
    for each in (clone, deep):
        for mine, theirs in zip(model.parameters(), each.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad)
    with pytest.raises(RuntimeError, match="only be called once"):
        for _ in range(2):
            model.register_comm_hook(None, lambda state, bucket: None)


def test_it_is_torchs_class_with_another_reducer(rank_pool, backend):
    rank_pool(2, backend).run(_wraps_like_torch)


def _logging_keys(rank, world):
    logged = []
    for cls in (torch.nn.parallel.DistributedDataParallel, DistributedDataParallel):
        model = cls(make_model("mlp"))
        for batch in batches(world, 3):
            loss_of(model(share(batch, rank))).backward()
        model(share(batch, rank))
        logged.append(model._get_ddp_logging_data())
    return logged


def test_logging_data_has_torchs_keys(rank_pool, backend):
    for theirs, mine in rank_pool(2, backend).run(_logging_keys):
        assert set(theirs) <= set(mine)
        timed = {key for key in theirs if "time" in key}
        for key in set(theirs) - timed:
            assert mine[key] == theirs[key], key
        assert all(mine[key] > 0 for key in timed)


def _join(rank, world, divide_by_initial_world_size):
    model = DistributedDataParallel(nn.Linear(1, 1, bias=False), bucket_cap_mb=1)
    history = []
    with model.join(divide_by_initial_world_size=divide_by_initial_world_size):
        for _ in range(2 + rank):
            model.zero_grad()
            model(torch.full((1, 1), 1.0 + rank)).sum().backward()
            history.append(model.module.weight.grad.item())
    return history


@pytest.mark.parametrize("whole", [True, False])
def test_join_with_uneven_inputs(rank_pool, backend, whole):
    short, long = rank_pool(2, backend).run(_join, whole)
    assert short == [1.5, 1.5]
    assert long == [1.5, 1.5, 1.0 if whole else 2.0]


def _new_group(rank, world):
    model = DistributedDataParallel(nn.Linear(2, 1, bias=False))
    for _ in range(2):
        model(torch.full((1, 2), 1.0 + rank)).sum().backward()
    alone = [dist.new_group([each]) for each in range(world)]
    model._update_process_group(alone[rank])
    model.zero_grad()
    for _ in range(2):
        model.zero_grad()
        model(torch.full((1, 2), 1.0 + rank)).sum().backward()
    return model.module.weight.grad[0, 0].item()


def test_the_process_group_can_be_replaced(rank_pool, backend):
    assert rank_pool(2, backend).run(_new_group) == [1.0, 2.0]
