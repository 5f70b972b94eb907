"""What the tests of device tensors do in each rank, on devices of any ``kind``: ``standin`` or ``cuda``."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import device_type
import torch
import torch.distributed as dist

from ourddp import _C

# What tells the ranks which devices there are, and what moves the data. The stand-in devices believe STAND_IN_*.
ENVIRONMENTS = {
    "ipc": {},
    "one device": {"STAND_IN_IDENTITIES": "0"},
    "two devices": {"STAND_IN_IDENTITIES": "0,1"},
    "staging": {"OURS_DEVICE_ENGINE": "staging"},
    "nccl": {"STAND_IN_NCCL": "1"},
    "nccl, blocking": {"STAND_IN_NCCL": "1", "OURS_BLOCKING_WAIT": "1"},
    "nccl, compared before": {"STAND_IN_NCCL": "1", "OURS_CHECK": "before"},
}


def here(kind: str) -> torch.device:
    """Return this rank's device, and make it the current one."""
    index = dist.get_rank() % torch.accelerator.device_count()
    torch.accelerator.set_device_index(index)
    return torch.device(kind, index)


class Sleeping:
    """A stream of CUDA's with much to do, which nobody can end early."""

    def __init__(self) -> None:
        """Give the current stream about a tenth of a second of work."""
        torch.cuda._sleep(200_000_000)

    def go_on(self) -> None:
        """Do nothing: the stream goes on by itself."""


def stop_stream(kind: str) -> Any:
    """Stop the current stream until ``go_on()`` is called on what this returns, or that is gone."""
    return device_type.load().stop_current_stream() if kind == device_type.NAME else Sleeping()


@contextlib.contextmanager
def stopped(kind: str) -> Iterator[Any]:
    """Stop the current stream until the end of the block, or until ``go_on()``."""
    stop = stop_stream(kind)
    try:
        yield stop
    finally:
        stop.go_on()


def poisoned(like: torch.Tensor) -> torch.Tensor:
    """Return memory for a result that no result looks like."""
    return torch.full_like(like, -77)


def values(shape: tuple[int, ...], dtype: torch.dtype, rank: int) -> torch.Tensor:
    """Return numbers that differ between ranks and places, as a CPU tensor."""
    generator = torch.Generator().manual_seed(rank)
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(shape, generator=generator, dtype=torch.float32).to(dtype)
    return torch.randint(1, 5, shape, generator=generator).to(dtype)


# --- groups ----------------------------------------------------------------------------------------------------------


def bound_to_a_device(rank: int, world: int, kind: str) -> None:
    """init_process_group(device_id=...) makes at once what the first collective of a device would make."""
    if kind == device_type.NAME:
        device_type.load()
    device = torch.device(kind, rank % torch.accelerator.device_count())
    dist.init_process_group(f"cpu:ours,{kind}:ours", device_id=device, timeout=timedelta(seconds=30))
    backend = dist.group.WORLD._get_backend(device)
    assert isinstance(backend, _C.ProcessGroupOurs)
    assert backend is dist.group.WORLD._get_backend(torch.device("cpu"))
    assert backend.device_engine() != ""
    dist.barrier()
    with torch.device(device):
        x = torch.ones(5)
    dist.all_reduce(x)
    assert x.cpu().eq(world).all()
    dist.all_reduce(x, group=dist.new_group(list(range(world))))
    assert x.cpu().eq(world * world).all()
    objects = [None] * world
    dist.all_gather_object(objects, {"rank": rank})
    assert [one["rank"] for one in objects] == list(range(world))
    dist.destroy_process_group()
