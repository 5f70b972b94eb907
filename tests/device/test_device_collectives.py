"""Collectives of device tensors: the same bits as on the CPU, whatever moves them."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from device_cases import ENVIRONMENTS, here, poisoned, values
from ranks import in_ranks

from ourddp import functional


def results(x: torch.Tensor, world: int) -> dict[str, list[torch.Tensor]]:
    """Call every collective with ``x``, on whichever device that is; return the outputs of each."""
    rank = dist.get_rank()
    rows = [x + i for i in range(world)]
    given: dict[str, list[torch.Tensor]] = {}

    def out(name: str, *tensors: torch.Tensor) -> list[torch.Tensor]:
        return given.setdefault(name, list(tensors))

    def blank() -> list[torch.Tensor]:
        return [poisoned(x) for _ in range(world)]

    dist.all_reduce(*out("all_reduce", x.clone()))
    dist.all_reduce(*out("all_reduce, strided", torch.stack([x, x], dim=-1)[..., 0]))
    dist.reduce(*(out("reduce", x.clone()) if rank == world - 1 else [x.clone()]), dst=world - 1)
    dist.broadcast(*out("broadcast", x.clone() if rank == 0 else poisoned(x)), src=0)
    dist.all_gather(out("all_gather", *blank()), x)
    dist.all_gather_into_tensor(*out("all_gather_single", torch.cat(blank())), x)
    dist.gather(x, out("gather", *blank()) if rank == 0 else None, dst=0)
    dist.scatter(*out("scatter", poisoned(x)), rows if rank == 0 else None, src=0)
    dist.reduce_scatter(*out("reduce_scatter", poisoned(x)), rows)
    dist.reduce_scatter_tensor(*out("reduce_scatter_single", poisoned(x)), torch.cat([x] * world))
    dist.all_to_all(out("all_to_all", *blank()), rows)
    # The last rank gets one element more from each rank than from the one before.
    flat = x.reshape(-1)[: world + rank].contiguous()
    sent = [1 + rank if i == world - 1 else 1 for i in range(world)]
    expected = [r + 1 if rank == world - 1 else 1 for r in range(world)]
    (output,) = out("all_to_all_single", poisoned(flat.new_empty(sum(expected))))
    dist.all_to_all_single(output, flat, expected, sent)
    out("functional.all_reduce", functional.all_reduce(x))
    out("functional.all_gather", functional.all_gather(x, -1))
    out("functional.reduce_scatter", functional.reduce_scatter(torch.cat([x] * world)))
    out("functional.all_to_all", functional.all_to_all(torch.cat(rows)))
    out("functional.reduce", functional.reduce(x, world - 1))
    out("functional.broadcast", functional.broadcast(x, 0))
    with dist._coalescing_manager(async_ops=True, device=x.device) as works:
        for tensor in out("coalesced", x.clone(), x + 1):
            dist.all_reduce(tensor)
    works.wait()
    return given


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.cpu().contiguous().view(torch.uint8)


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("env", [name for name in ENVIRONMENTS if name != "nccl, blocking"], indirect=True)
@in_ranks(None, "backend", "env", timeout=120)
def test_results_are_the_cpus(rank: int, world: int, kind: str) -> None:
    device = here(kind)
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.complex64):
        for shape in ((5, 7), (3000, 40)):
            x = values(shape, dtype, rank)
            got = results(x.to(device), world)
            for name, expected in results(x, world).items():
                for g, e in zip(got[name], expected, strict=True):
                    assert g.device == device
                    assert torch.equal(bits(g), bits(e)), f"{name} of {shape} {dtype}"
    for op in (dist.ReduceOp.AVG, dist.ReduceOp.MAX, dist.ReduceOp.PRODUCT, dist._make_nccl_premul_sum(0.3)):
        x = values((1000,), torch.float32, rank)
        y = x.to(device)
        dist.all_reduce(x, op)
        dist.all_reduce(y, op)
        assert torch.equal(bits(y), bits(x))
    empty = torch.empty(0, 3, device=device)
    dist.all_reduce(empty)
    dist.broadcast(empty, 0)
    dist.all_gather([torch.empty_like(empty) for _ in range(world)], empty)
