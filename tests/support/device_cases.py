"""What the tests of device tensors do in each rank, on devices of any ``kind``: ``standin`` or ``cuda``."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import device_type
import torch
import torch.distributed as dist

from ourddp import _C


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


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.cpu().contiguous().view(torch.uint8)


# --- the collectives: each takes an input and returns its outputs, on whichever device the input is ------------------


def all_reduce(x: torch.Tensor, world: int, op: dist.ReduceOp = dist.ReduceOp.SUM) -> list[torch.Tensor]:
    y = x.clone()
    dist.all_reduce(y, op)
    return [y]


def all_reduce_strided(x: torch.Tensor, world: int) -> list[torch.Tensor]:
    y = torch.stack([x, x], dim=-1)[..., 0]
    dist.all_reduce(y)
    return [y]


def reduce(x: torch.Tensor, world: int) -> list[torch.Tensor]:
    y = x.clone()
    dist.reduce(y, dst=world - 1)
    return [y] if dist.get_rank() == world - 1 else []


def broadcast(x: torch.Tensor, world: int) -> list[torch.Tensor]:
    y = x.clone() if dist.get_rank() == 0 else poisoned(x)
    dist.broadcast(y, src=0)
    return [y]


def all_gather(x: torch.Tensor, world: int) -> list[torch.Tensor]:
    outputs = [poisoned(x) for _ in range(world)]
    dist.all_gather(outputs, x)
    return outputs


def all_gather_single(x: torch.Tensor, world: int) -> list[torch.Tensor]:
    output = poisoned(x.new_empty((world * x.shape[0], *x.shape[1:])))
    dist.all_gather_into_tensor(output, x)
    return [output]


def gather(x: torch.Tensor, world: int) -> list[torch.Tensor]:
    outputs = [poisoned(x) for _ in range(world)] if dist.get_rank() == 0 else None
    dist.gather(x, outputs, dst=0)
    return outputs or []


def scatter(x: torch.Tensor, world: int) -> list[torch.Tensor]:
    output = poisoned(x)
    dist.scatter(output, [x + i for i in range(world)] if dist.get_rank() == 0 else None, src=0)
    return [output]


def reduce_scatter(x: torch.Tensor, world: int) -> list[torch.Tensor]:
    output = poisoned(x)
    dist.reduce_scatter(output, [x + i for i in range(world)])
    return [output]


def reduce_scatter_single(x: torch.Tensor, world: int) -> list[torch.Tensor]:
    output = poisoned(x)
    dist.reduce_scatter_tensor(output, torch.cat([x] * world))
    return [output]


def all_to_all(x: torch.Tensor, world: int) -> list[torch.Tensor]:
    outputs = [poisoned(x) for _ in range(world)]
    dist.all_to_all(outputs, [x + i for i in range(world)])
    return outputs


def all_to_all_single(x: torch.Tensor, world: int) -> list[torch.Tensor]:
    rank = dist.get_rank()
    flat = x.reshape(-1)[: world + rank].contiguous()
    sizes = [1 + rank if i == world - 1 else 1 for i in range(world)]
    expected = [r + 1 if rank == world - 1 else 1 for r in range(world)]
    output = poisoned(flat.new_empty(sum(expected)))
    dist.all_to_all_single(output, flat, expected, sizes)
    return [output]


def coalesced(x: torch.Tensor, world: int) -> list[torch.Tensor]:
    first, second = x.clone(), x + 1
    with dist._coalescing_manager(async_ops=True, device=x.device) as works:
        dist.all_reduce(first)
        dist.all_reduce(second)
    works.wait()
    return [first, second]


COLLECTIVES: list[Callable[..., list[torch.Tensor]]] = [
    all_reduce,
    all_reduce_strided,
    reduce,
    broadcast,
    all_gather,
    all_gather_single,
    gather,
    scatter,
    reduce_scatter,
    reduce_scatter_single,
    all_to_all,
    all_to_all_single,
    coalesced,
]


def same_as_on_the_cpu(rank: int, world: int, kind: str) -> None:
    """Every collective gives the same bits on the device as on the CPU."""
    device = here(kind)
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.complex64):
        for shape in ((5, 7), (3000, 40)):
            x = values(shape, dtype, rank)
            for collective in COLLECTIVES:
                expected = collective(x, world)
                got = collective(x.to(device), world)
                assert len(got) == len(expected)
                for g, e in zip(got, expected, strict=True):
                    assert g.device == device
                    assert torch.equal(bits(g), bits(e)), f"{collective.__name__} of {shape} {dtype}"
    for op in (dist.ReduceOp.AVG, dist.ReduceOp.MAX, dist.ReduceOp.PRODUCT, dist._make_nccl_premul_sum(0.3)):
        x = values((1000,), torch.float32, rank)
        assert torch.equal(bits(all_reduce(x.to(device), world, op)[0]), bits(all_reduce(x, world, op)[0]))
    for empty in (all_reduce, broadcast, all_gather):
        assert all(t.numel() == 0 for t in empty(torch.empty(0, 3, device=device), world))


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


def tensors_of_the_backend(rank: int, world: int, kind: str) -> None:
    """The backend allocates tensors for a device, too."""
    device = here(kind)
    backend = dist.group.WORLD._get_backend(device)
    for _ in range(2):  # before the device's group is made, and after
        tensor = backend.allocate_tensor(1000, dtype=torch.float32, device=device)
        assert (tensor.device, tensor.shape, tensor.dtype) == (device, (1000,), torch.float32)
        dist.all_reduce(tensor.fill_(rank))
        assert tensor.cpu().eq(sum(range(world))).all()
