"""Arguments, buckets and attributes: what torch's DistributedDataParallel has and does, ours has and does."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ddp_cases import (
    CLASSES,
    TorchDDP,
    assert_same,
    batches,
    gradients,
    known,
    loss_of,
    make_model,
    outcome,
    share,
    train,
)
from ranks import in_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from ourddp import _C, DistributedDataParallel
from ourddp.logging_data import ReducerLogger

# --- arguments -------------------------------------------------------------------------------------------------------


def test_the_signature_is_torchs():
    assert inspect.signature(DistributedDataParallel) == inspect.signature(TorchDDP)


@in_ranks(2)
def test_what_torch_refuses_is_refused_in_the_same_words(rank, world):
    frozen = nn.Linear(2, 2).requires_grad_(False)
    mesh = init_device_mesh("cpu", (world,))
    square = init_device_mesh("cpu", (world, 1), mesh_dim_names=("one", "two"))
    parameter = nn.Parameter(torch.ones(1))
    cases: list[tuple[str, nn.Module, dict[str, Any]]] = [
        ("RuntimeError", frozen, {}),
        ("RuntimeError", nn.LazyLinear(2), {}),
        ("RuntimeError", nn.Linear(2, 2), {"process_group": dist.group.WORLD, "device_mesh": mesh}),
        ("RuntimeError", nn.Linear(2, 2), {"device_mesh": square}),
        ("ValueError", nn.Linear(2, 2), {"device_ids": [0, 1]}),
        ("ValueError", nn.Linear(2, 2), {"device_ids": [0]}),
        ("ValueError", nn.Linear(2, 2), {"output_device": 1}),
        ("ValueError", nn.Linear(2, 2), {"param_to_hook_all_reduce": parameter}),
        ("ValueError", nn.Linear(2, 2), {"delay_all_reduce_named_params": [("weight", parameter)]}),
        ("FutureWarning", nn.Linear(2, 2), {"check_reduction": True}),
    ]
    for kind, module, options in cases:
        theirs, mine = (outcome(lambda c=cls, m=module, o=options: c(m, **o)) for cls in CLASSES)
        assert theirs == mine
        assert theirs[0] == kind, (options, theirs)


BUCKETS: dict[str, dict[str, Any]] = {
    "default": {},
    "one cap": {"bucket_cap_mb": 0.002},
    "a list": {"bucket_cap_mb_list": [0.001, 0.004]},
    "a short list": {"bucket_cap_mb_list": [0.0005]},
    "unused": {"find_unused_parameters": True, "bucket_cap_mb": 0.003},
    "unused, a list": {"find_unused_parameters": True, "bucket_cap_mb_list": [0.001, 0.002, 0.01]},
    "static": {"static_graph": True, "bucket_cap_mb": 0.002},
    "view, not synchronised": {"gradient_as_bucket_view": True, "bucket_cap_mb": 0.001, "broadcast_buffers": False},
}


@pytest.mark.parametrize("name", ["mlp", "cnn"])
@pytest.mark.parametrize("options", BUCKETS.values(), ids=BUCKETS)
@in_ranks(2, "backend")
def test_what_is_logged_and_the_buckets_are_torchs(rank, world, options, name):
    logged = []
    for cls in CLASSES:
        model = cls(make_model(name), **known(options))
        train(model, rank, world)
        model(share(next(batches(world, 1)), rank))
        logged.append(model._get_ddp_logging_data())
    theirs, mine = logged
    timed = {key for key in theirs if "time" in key}
    assert {key: mine.get(key) for key in theirs if key not in timed} == {
        k: v for k, v in theirs.items() if k not in timed
    }
    assert all(mine[key] > 0 for key in timed)


@in_ranks(4)
def test_groups_can_be_parts_of_a_mesh(rank, world):
    row = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("rows", "columns"))
    results = []
    for cls in CLASSES:
        whole = cls(make_model("mlp"), device_mesh=init_device_mesh("cpu", (world,)))
        results.append(train(whole, rank, world))
        part = cls(make_model("mlp"), device_mesh=row["columns"])
        assert dist.get_world_size(part.process_group) == world // 2
        results.append(train(part, rank, world))
        subgroup = cls(make_model("mlp"), process_group=row["columns"].get_group())
        results.append(train(subgroup, rank, world))
    assert_same(results[3], results[0], "whole mesh")
    assert_same(results[4], results[1], "part of a mesh")
    assert_same(results[5], results[2], "subgroup")
    assert not torch.equal(results[0]["layers.0.weight"], results[1]["layers.0.weight"])


class Delayed(nn.Module):
    """Its gradients come before that of the layer which makes its input; `frozen` has none."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = make_model("mlp")
        self.frozen = nn.Linear(8, 8).requires_grad_(False)

    def forward(self, x):
        return self.layers(self.frozen(x))


@pytest.mark.parametrize("everything", [False, True])
@in_ranks(2)
def test_reductions_can_be_delayed(rank, world, everything):
    histories = []
    for cls in CLASSES:
        torch.manual_seed(5)
        front, module = nn.Linear(8, 8), Delayed()
        options: dict[str, Any] = {}
        if cls is DistributedDataParallel:
            names = [n for n, p in module.named_parameters() if p.requires_grad and (everything or ".6." in n)]
            delayed = [(name, module.get_parameter(name)) for name in names]
            options = {"delay_all_reduce_named_params": delayed, "param_to_hook_all_reduce": front.weight}
        model = cls(module, **options)
        history = []
        for batch in batches(world, 3):
            model.zero_grad()
            loss_of(model(front(share(batch, rank)))).backward()
            dist.barrier()  # nobody waits for a delayed reduction, but it ends before what comes after it
            history.append(gradients(model))
        histories.append(history)
    for step, (theirs, mine) in enumerate(zip(*histories, strict=True)):
        assert_same(mine, theirs, f"step {step}")


# --- what libraries reach for ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("theirs", "mine"), [(dist.Reducer, _C.Reducer), (dist.Logger, ReducerLogger)])
def test_the_reducer_and_its_logger_have_torchs_methods(theirs, mine):
    assert {name for name in dir(theirs) if "pybind11" not in name} <= set(dir(mine))


@in_ranks(2)
def test_a_model_has_torchs_attributes(rank, world):
    theirs, mine = (vars(cls(make_model("mlp"))) for cls in CLASSES)
    # torch keeps this one, which our reducer knows better, behind a property.
    assert set(theirs) - set(mine) <= {"_static_graph_delay_allreduce_enqueued"}
