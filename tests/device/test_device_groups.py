"""Process groups of devices: how they are made, and what else they offer."""

from __future__ import annotations

import device_cases
import pytest
import torch
import torch.distributed as dist
from ranks import in_ranks, run_ranks

from ourddp import _C


@pytest.mark.parametrize("world", [1, 2])
def test_a_group_is_bound_to_a_device(kind, world):
    env = device_cases.device_type.environment() if kind == device_cases.device_type.NAME else {}
    run_ranks(world, device_cases.bound_to_a_device, kind, backend=None, env=env)


@in_ranks(2, "backend")
def test_the_devices_are_listed(rank: int, world: int, kind: str) -> None:
    facts = _C.device_facts(kind)
    assert (facts["obstacle"], facts["device_obstacle"]) == ("", "")
    assert len(facts["devices"]) == (8 if kind == device_cases.device_type.NAME else torch.cuda.device_count())
    assert all(facts["devices"])


@in_ranks(2, "backend")
def test_tensors_of_the_backend(rank: int, world: int, kind: str) -> None:
    """The backend allocates tensors for a device, too."""
    device = device_cases.here(kind)
    backend = dist.group.WORLD._get_backend(device)
    for _ in range(2):  # before the device's group is made, and after
        tensor = backend.allocate_tensor(1000, dtype=torch.float32, device=device)
        assert (tensor.device, tensor.shape, tensor.dtype) == (device, (1000,), torch.float32)
        dist.all_reduce(tensor.fill_(rank))
        assert tensor.cpu().eq(sum(range(world))).all()


@pytest.mark.parametrize("kind", [device_cases.device_type.NAME])
@in_ranks(2, "backend")
def test_capture_is_refused(rank: int, world: int, standin: str) -> None:
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


@pytest.mark.parametrize("kind", [device_cases.device_type.NAME])
@in_ranks(2, "backend")
def test_messages_break_no_capture_of_others(rank: int, world: int, standin: str) -> None:
    """The memory of their copies may be allocated while another thread captures its stream."""
    module = device_cases.device_type.load()
    device = device_cases.here(device_cases.device_type.NAME)
    x, y = torch.full((5000,), float(rank), device=device), torch.empty(5000, device=device)
    with torch.Stream(device=device):
        module.set_capturing(True)
    try:
        with pytest.raises(RuntimeError, match="would break the capture"):
            torch.empty(4, pin_memory=True)
        works = [dist.irecv(y, 1 - rank), dist.isend(x, 1 - rank)]
        for work in works:
            work.wait()
    finally:
        module.set_capturing(False)
    assert y.cpu().eq(1 - rank).all()
