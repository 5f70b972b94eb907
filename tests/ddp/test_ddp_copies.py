"""Models that have been pickled, saved as a whole, or copied."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ddp_cases import CLASSES, assert_same, make_model, outcome, train
from ranks import in_ranks

from ourddp import DistributedDataParallel


def _through_save(model):
    """Save the whole model as a file and load it."""
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


COPIES: dict[str, Callable[[Any], Any]] = {
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "deepcopy": copy.deepcopy,
    "save": _through_save,
}

COPIED: dict[str, dict[str, Any]] = {
    "plain": {},
    "view": {"gradient_as_bucket_view": True, "bucket_cap_mb": 0.001},
    "static": {"static_graph": True},
    "unused": {"find_unused_parameters": True, "broadcast_buffers": False},
}


@pytest.mark.parametrize("kind", COPIES)
@pytest.mark.parametrize("options", COPIED.values(), ids=COPIED)
@in_ranks(2)
def test_copies_go_on(rank, world, options, kind):
    """Copies of a model that has trained go on as torch's original does."""
    found = []
    for cls in CLASSES:
        model = cls(make_model("cnn"), **options)
        train(model, rank, world)
        model.zero_grad()
        if cls is DistributedDataParallel:
            original, model = model, COPIES[kind](model)
            assert type(model) is cls
            assert model.module.conv.weight.data_ptr() != original.module.conv.weight.data_ptr()
        found.append(train(model, rank, world))
        data = model._get_ddp_logging_data()
        found.append({"static": model.static_graph, "name": data["module_name"], "logged": data.get("static_graph")})
    assert_same(found[2], found[0], f"rank {rank}")
    assert found[3] == found[1]


@in_ranks(2)
def test_a_model_of_another_group_cannot_be_pickled(rank, world):
    group = dist.new_group(list(range(world)))
    outcomes = [outcome(lambda c=cls: pickle.dumps(c(make_model("mlp"), process_group=group))) for cls in CLASSES]
    assert outcomes[0] == outcomes[1]
    assert outcomes[0][0] == "RuntimeError"
