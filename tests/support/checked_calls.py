"""Collectives of any kind, whose results each rank compares with what they must be."""

from __future__ import annotations

import torch
import torch.distributed as dist
from collective_model import OPS, laid_out, raw, reduced, values
from torch.testing import assert_close


def run_reduction(
    rank: int, world: int, call: str, dtype: torch.dtype, op: str, shape: tuple, layout: str, seed: int
) -> None:
    def input_of(r: int) -> torch.Tensor:
        return values(shape, dtype, 1000 * seed + r)

    everyone = [input_of(r) for r in range(world)]
    expected = reduced(everyone, op)
    tolerance = {"rtol": 1e-2, "atol": 1e-2} if dtype in (torch.float16, torch.bfloat16) else {}
    if call == "all_reduce":
        tensor = laid_out(input_of(rank), layout)
        dist.all_reduce(tensor, OPS[op])
        assert_close(tensor, expected, **tolerance)
    elif call == "reduce":
        root = seed % world
        tensor = laid_out(input_of(rank), layout)
        dist.reduce(tensor, root, OPS[op])
        if rank == root:
            assert_close(tensor, expected, **tolerance)
        else:
            assert torch.equal(raw(tensor), raw(input_of(rank))), "reduce wrote to a rank that is not the root"
    elif call == "reduce_scatter":
        parts = [[values(shape, dtype, 1000 * seed + 10 * r + d) for d in range(world)] for r in range(world)]
        output = laid_out(torch.zeros(shape).to(dtype), layout)
        dist.reduce_scatter(output, [laid_out(t, layout) for t in parts[rank]], OPS[op])
        assert_close(output, reduced([parts[r][rank] for r in range(world)], op), **tolerance)
    else:
        wholes = [values((world, *shape), dtype, 1000 * seed + r) for r in range(world)]
        output = laid_out(torch.zeros((1, *shape)).to(dtype), layout)
        dist.reduce_scatter_tensor(output, laid_out(wholes[rank], layout), OPS[op])
        assert_close(output[0], reduced([whole[rank] for whole in wholes], op), **tolerance)


def run_movement(rank: int, world: int, call: str, dtype: torch.dtype, shape: tuple, layout: str, seed: int) -> None:
    root = seed % world

    def value_of(r: int, d: int = 0) -> torch.Tensor:
        return values(shape, dtype, 1000 * seed + 10 * r + d)

    def empty() -> torch.Tensor:
        return laid_out(torch.zeros(shape).to(dtype), layout)

    mine = laid_out(value_of(rank), layout)
    got: list[torch.Tensor]
    if call == "broadcast":
        got, expected = [mine], [value_of(root)]
        dist.broadcast(mine, root)
    elif call == "all_gather":
        got, expected = [empty() for _ in range(world)], [value_of(r) for r in range(world)]
        dist.all_gather(got, mine)
    elif call == "gather":
        got = [empty() for _ in range(world)] if rank == root else []
        expected = [value_of(r) for r in range(world)] if rank == root else []
        dist.gather(mine, got if rank == root else None, root)
    elif call == "scatter":
        got, expected = [empty()], [value_of(root, rank)]
        dist.scatter(
            got[0], [laid_out(value_of(root, d), layout) for d in range(world)] if rank == root else None, root
        )
    elif call == "all_to_all":
        got, expected = [empty() for _ in range(world)], [value_of(s, rank) for s in range(world)]
        dist.all_to_all(got, [laid_out(value_of(rank, d), layout) for d in range(world)])
    else:
        got, expected = [empty()], [value_of((rank - 1) % world)]
        if world == 1:
            return
        requests = [dist.isend(mine, (rank + 1) % world), dist.irecv(got[0], (rank - 1) % world)]
        for request in requests:
            request.wait()
    for one, other in zip(got, expected, strict=True):
        assert torch.equal(raw(one), raw(other)), f"{call}: {one} instead of {other}"


def run_async(rank: int, world: int, calls: list[tuple[str, int]], waits: list[int]) -> None:
    """Issue all calls without waiting, then wait in an order that ``waits`` makes different on each rank."""
    works, checks = [], []
    for i, (call, count) in enumerate(calls):
        tensor = torch.full((count,), float(rank + i))
        total = float(sum(r + i for r in range(world)))
        if call == "all_reduce":
            works.append(dist.all_reduce(tensor, async_op=True))
            checks.append((tensor, torch.full((count,), total)))
        elif call == "all_reduce sync":
            dist.all_reduce(tensor)
            assert torch.equal(tensor, torch.full((count,), total))
        elif call == "broadcast":
            works.append(dist.broadcast(tensor, i % world, async_op=True))
            checks.append((tensor, torch.full((count,), float(i % world + i))))
        else:
            whole = torch.empty(world * count)
            works.append(dist.all_gather_into_tensor(whole, tensor, async_op=True))
            checks.append((whole, torch.arange(world).repeat_interleave(count) + float(i)))
    for index in sorted(range(len(works)), key=lambda i: (waits[i] * (rank + 1)) % 7):
        works[index].wait()
        assert works[index].is_completed()
        assert works[index].is_success()
        assert torch.equal(*checks[index])
