"""Ways to call a collective: coalesced, with one tensor for all ranks, functional, and with invalid arguments."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from collective_cases import single_calls
from probes import backend_of
from ranks import in_ranks


@pytest.mark.parametrize("world", [1, 3])
def test_coalescing_and_single_tensor_calls(rank_pool, world, nodes):
    rank_pool(world, nodes=nodes).run(single_calls)


@in_ranks(3, "nodes")
def test_functional_collectives(rank: int, world: int) -> None:
    import torch.distributed._functional_collectives as collectives

    group = dist.group.WORLD
    total = collectives.all_reduce(torch.full((3,), float(rank)), "sum", group)
    assert torch.equal(total.wait() if hasattr(total, "wait") else total, torch.full((3,), float(sum(range(world)))))
    whole = collectives.all_gather_tensor(torch.full((2,), float(rank)), 0, group)
    assert torch.equal(torch.as_tensor(whole), torch.arange(world).repeat_interleave(2).float())
    piece = collectives.reduce_scatter_tensor(torch.ones(2 * world), "avg", 0, group)
    assert torch.equal(torch.as_tensor(piece), torch.ones(2))
    exchanged = collectives.all_to_all_single(torch.full((world,), float(rank)), None, None, group)
    assert torch.equal(torch.as_tensor(exchanged), torch.arange(float(world)))


@in_ranks(2, "nodes")
def test_invalid_arguments_raise_value_error_with_both_values(rank: int, world: int) -> None:
    group = dist.group.WORLD
    expanded = torch.zeros(1).expand(4)
    window = torch.zeros(9).as_strided((3, 4), (1, 2))
    meta = torch.zeros(2, device="meta")
    backend = backend_of(group)
    wrong_root = dist.BroadcastOptions()
    wrong_root.rootRank = world
    most = 2**63 - 1
    calls = [
        (lambda: dist.all_reduce(expanded), r"share memory .*contiguous"),
        (lambda: dist.all_reduce(window), r"share memory"),
        (lambda: backend.allreduce([meta]), r"is on meta"),
        (
            lambda: backend.broadcast([torch.zeros(1), torch.zeros(1)], dist.BroadcastOptions()),
            r"expected one tensor .* got 2",
        ),
        (lambda: backend.broadcast([torch.zeros(1)], wrong_root), rf"root is {world} in a group of {world}"),
        (
            lambda: dist.all_gather_into_tensor(torch.zeros(2 * world + 1), torch.zeros(2)),
            rf"{2 * world + 1} elements.*needs {2 * world}",
        ),
        (lambda: dist.reduce_scatter_tensor(torch.zeros(2), torch.zeros(2 * world + 2)), rf"{2 * world + 2} elements"),
        (
            lambda: group.allgather([[torch.zeros(1)] * (world + 1)], [torch.zeros(1)]),
            rf"has {world + 1} tensors, but the group has {world} ranks",
        ),
        (
            lambda: dist.all_to_all_single(torch.zeros(world + 1), torch.zeros(world + 1)),
            r"divided equally.*split_sizes",
        ),
        (
            lambda: dist.all_to_all_single(torch.zeros(world), torch.zeros(world), [1] * world, [2] * world),
            rf"add up to {2 * world}, but dimension 0 of the input has {world}",
        ),
        (
            lambda: dist.all_to_all_single(torch.zeros(4), torch.zeros(4), *[[most, most, *[6] * (world - 2)]] * 2),
            rf"add up to {most}, but dimension 0 of the \w+ has 4",
        ),
        (
            lambda: dist.all_reduce(torch.zeros(2), dist._make_nccl_premul_sum(torch.tensor(1j))),
            r"factor of ReduceOp.PREMUL_SUM is of type ComplexFloat; pass a real number",
        ),
    ]
    for call, text in calls:
        with pytest.raises(ValueError, match=text):
            call()
    dist.barrier()
