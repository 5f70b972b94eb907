"""Random combinations of options, models and steps: gradients, parameters and buffers are those of torch's class."""

from __future__ import annotations

import inspect
import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ddp_cases import (
    CLASSES,
    MODELS,
    TorchDDP,
    assert_same,
    averaging_hook,
    batches,
    gradients,
    loss_of,
    make_model,
    share,
)
from ranks import in_ranks
from torch import nn

# The model with gradients of 64 KiB and more, which are not copied into buckets.
MODELS["wide"] = lambda: nn.Sequential(nn.Linear(8, 2048), nn.Tanh(), nn.Linear(2048, 16), nn.Tanh(), nn.Linear(16, 3))
SHAPES = ["mlp", "cnn", "mixed", "sparse", "branches", "checkpoint", "checkpoint_twice", "wide", "wide"]


@dataclass
class Case:
    """What to train, how, and what happens in each step.

    A step is a character: S synchronises, N does not, 2 has two forwards, J both N and S, E only evaluates.
    """

    model: str
    options: dict[str, Any]
    steps: str
    zero: str
    hook: str


def make_case(seed: int) -> Case:
    """Return a case that torch's class can run: it has limits with static graphs, which other tests are about."""
    choose = random.Random(seed)
    known = inspect.signature(TorchDDP).parameters
    model = choose.choice(SHAPES)
    options: dict[str, Any] = {
        "gradient_as_bucket_view": choose.random() < 0.5,
        "batched_grad_copy": choose.random() < 0.3,
        "lazy_bucket_allocation": choose.random() < 0.3,
        "broadcast_buffers": choose.random() < 0.7,
    }
    kind = choose.choice(["static_graph", "find_unused_parameters", None])
    if model == "branches" and kind is None:
        kind = "find_unused_parameters"
    if kind:
        options[kind] = True
    if choose.random() < 0.6:
        options["bucket_cap_mb"] = choose.choice([0.0001, 0.001, 0.002, 0.1])
    elif choose.random() < 0.5:
        options["bucket_cap_mb_list"] = choose.choice([[0.001, 0.004], [0.0005], [0.0001, 0.1, 1]])
    steps = "".join(choose.choice("SSNJ2E") for _ in range(choose.randint(3, 6)))
    if kind == "static_graph":
        steps = "S" + steps.replace("2", "S")
    hook = choose.choice(["", "", "", "average", "ALLREDUCE"])
    options = {name: value for name, value in options.items() if name in known}
    return Case(model, options, steps, choose.choice(["none", "zero", "never", "mixed"]), hook)


def _history(cls: type, case: Case, rank: int, world: int) -> list[dict[str, Any]]:
    model = cls(make_model(case.model), **case.options)
    if case.hook == "average":
        model.register_comm_hook([], averaging_hook)
    elif case.hook:
        model._register_builtin_comm_hook(getattr(dist.BuiltinCommHookType, case.hook))
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    history = []
    for index, (step, batch) in enumerate(zip(case.steps, batches(world, len(case.steps)), strict=True)):
        if case.zero != "never":
            model.zero_grad(set_to_none=case.zero == "none" or (case.zero == "mixed" and index % 2 == 0))
        x = share(batch, rank)
        if step == "E":
            with torch.no_grad():
                history.append({"output": model(x)})
            continue
        if step in "NJ":
            with model.no_sync():
                loss_of(model(x)).backward()
        if step == "2":
            (loss_of(model(x)) + loss_of(model(x * 0.5))).backward()
        elif step in "SJ":
            loss_of(model(x * 2)).backward()
        history.append(gradients(model))
        if step != "N":
            optimizer.step()
    history.append({name: value.clone() for name, value in model.module.state_dict().items()})
    return history


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("seed", range(20))
@in_ranks()
def test_a_random_case(rank: int, world: int, seed: int) -> None:
    case = make_case(seed + 1000 * world)
    theirs = _history(CLASSES[0], case, rank, world)
    mine = _history(CLASSES[1], case, rank, world)
    for index, (expected, actual) in enumerate(zip(theirs, mine, strict=True)):
        assert_same(actual, expected, f"{case}, rank {rank}, step {index}")
