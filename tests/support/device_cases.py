"""What the tests of device tensors do in each rank, on devices of any ``kind``: ``standin`` or ``cuda``."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, ClassVar

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


class Stop:
    """Makes CUDA's current stream wait until a word of the host's memory is not 0 any more."""

    kept: ClassVar[list[torch.Tensor]] = []  # the device may look at them once more
    AT_LEAST = 0

    def __init__(self) -> None:
        """Stop the stream."""
        self._word = torch.zeros(1, dtype=torch.int32, pin_memory=True)
        self.kept.append(self._word)
        stream, address = torch.cuda.current_stream().cuda_stream, self._word.data_ptr()
        wait = ctypes.CDLL("libcuda.so.1").cuStreamWaitValue32_v2
        error = wait(ctypes.c_void_p(stream), ctypes.c_uint64(address), ctypes.c_uint32(1), self.AT_LEAST)
        assert error == 0, f"cuStreamWaitValue32: {error}"

    def go_on(self) -> None:
        """Let the stream go on."""
        self._word.fill_(1)

    __del__ = go_on


def stop_stream(kind: str) -> Any:
    """Stop the current stream until ``go_on()`` is called on what this returns, or that is gone."""
    return device_type.load().stop_current_stream() if kind == device_type.NAME else Stop()


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
