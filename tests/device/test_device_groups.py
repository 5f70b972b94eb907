"""Process groups of devices: how they are made, and what else they offer."""

from __future__ import annotations

import device_cases
import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

from ourddp import _C


@pytest.mark.parametrize("world", [1, 2])
def test_a_group_is_bound_to_a_device(kind, world):
    env = device_cases.device_type.environment() if kind == device_cases.device_type.NAME else {}
    run_ranks(world, device_cases.bound_to_a_device, kind, backend=None, env=env)


def test_the_devices_are_listed(rank_pool, kind):
    rank_pool(2, f"cpu:ours,{kind}:ours").run(listed, kind)


def listed(rank: int, world: int, kind: str) -> None:
    facts = _C.device_facts(kind)
    assert (facts["obstacle"], facts["device_obstacle"]) == ("", "")
    assert len(facts["devices"]) == (8 if kind == device_cases.device_type.NAME else torch.cuda.device_count())
    assert all(facts["devices"])


def test_tensors_of_the_backend(rank_pool, kind):
    rank_pool(2, f"cpu:ours,{kind}:ours").run(device_cases.tensors_of_the_backend, kind)


def test_capture_is_refused(rank_pool, standin):
    rank_pool(2, f"cpu:ours,{standin}:ours").run(while_capturing)


def while_capturing(rank: int, world: int) -> None:
    module = device_cases.device_type.load()
    device = device_cases.here(device_cases.device_type.NAME)
    x = torch.ones(4, device=device)
    module.set_capturing(True)
    try:
        with pytest.raises(RuntimeError, match=r"all_reduce of tensors on .* cannot be captured"):
            dist.all_reduce(x)
        with pytest.raises(RuntimeError, match=r"send of tensors on .* cannot be captured"):
            dist.send(x, 1 - rank)
    finally:
        module.set_capturing(False)
    dist.all_reduce(x)
    assert x.cpu().eq(world).all()


def test_a_missing_library_says_what_to_do():
    facts = _C.device_facts("cuda")
    if facts["obstacle"]:
        assert "build again" in facts["obstacle"] or "Build ourddp again" in facts["obstacle"]
