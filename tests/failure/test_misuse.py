"""What programs written for Gloo catch: the types of errors that invalid calls raise, and words in their messages."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from probes import HAS_BACKEND_OPTIONS, HAS_HOOKS, backend_of
from ranks import in_ranks

import ourddp


def rooted(options: Any, root: int, tensor: int = 0) -> Any:
    options.rootRank = root
    if tensor:
        options.rootTensor = tensor
    return options


def zeros(*sizes: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [torch.zeros(size, dtype=dtype) for size in sizes]


MISUSES: dict[str, Callable[[Any], Any]] = {
    "all_reduce of different sizes": lambda g: g.allreduce(zeros(2, 3)),
    "all_reduce of different types": lambda g: g.allreduce(zeros(2) + zeros(2, dtype=torch.int32)),
    "broadcast from no rank": lambda g: g.broadcast(zeros(2), rooted(dist.BroadcastOptions(), 7)),
    "broadcast of no tensor": lambda g: g.broadcast(zeros(2), rooted(dist.BroadcastOptions(), 0, 3)),
    "reduce of two": lambda g: g.reduce(zeros(2, 2), dist.ReduceOptions()),
    "reduce to no rank": lambda g: g.reduce(zeros(2), rooted(dist.ReduceOptions(), 7)),
    "all_gather into too few": lambda g: g.allgather([zeros(2)], zeros(2)),
    "all_gather into other sizes": lambda g: g.allgather([zeros(3, 3)], zeros(2)),
    "all_gather into other types": lambda g: g.allgather([zeros(2, 2, dtype=torch.int32)], zeros(2)),
    "gather to no rank": lambda g: g.gather([], zeros(2), rooted(dist.GatherOptions(), 7)),
    "scatter from no rank": lambda g: g.scatter(zeros(2), [], rooted(dist.ScatterOptions(), 7)),
    "all_to_all of what does not divide": lambda g: g.alltoall_base(
        torch.zeros(3), torch.zeros(3), [], [], dist.AllToAllOptions()
    ),
    "all_to_all of wrong splits": lambda g: g.alltoall_base(
        torch.zeros(4), torch.zeros(4), [1, 1], [2, 2], dist.AllToAllOptions()
    ),
}


@in_ranks(2, "backend")
def test_invalid_calls_raise_runtime_errors_as_with_gloo(rank: int, world: int, backend: str) -> None:
    ours = backend == "ours"
    group = dist.group.WORLD
    assert issubclass(ourddp.MisuseError, ValueError)
    assert issubclass(ourddp.MisuseError, RuntimeError)
    for name, call in MISUSES.items():
        if not ours and not HAS_HOOKS and name == "all_to_all of what does not divide":
            continue  # Gloo accepts that before torch 2.15
        with pytest.raises(ourddp.MisuseError if ours else RuntimeError):
            work = call(group)
            if not ours:
                work.wait()  # before torch 2.15, Gloo checks some of them only when it runs them


@in_ranks(2)
def test_all_reduce_of_several_tensors_is_refused(rank: int, world: int) -> None:
    with pytest.raises(ValueError, match=r"expected one tensor as input but got 2; .*all_reduce_coalesced"):
        dist.group.WORLD.allreduce([torch.ones(2), torch.ones(2)])
    tensors = [torch.ones(2), torch.full((3,), 2.0)]
    dist.group.WORLD.allreduce_coalesced(tensors).wait()
    assert [tensor.tolist() for tensor in tensors] == [[world] * 2, [2 * world] * 3]


@in_ranks(2)
def test_the_error_for_an_absent_rank_has_the_words_of_other_backends(rank: int, world: int) -> None:
    store = dist.distributed_c10d._get_default_store()
    if rank == 1:
        store.wait(["rank 0 gave up"])
        return
    group = dist.PrefixStore("never joined", store)
    with pytest.raises(dist.DistBackendError, match="timeout after 10ms"):
        dist.group.WORLD.merge_remote_group(group, world, timedelta(milliseconds=10), "alone")
    store.set("rank 0 gave up", "")
    if HAS_BACKEND_OPTIONS:
        assert backend_of().options._timeout == timedelta(seconds=60)  # the short timeout was the child's alone


@pytest.mark.parametrize("call", ["recv", "all_reduce"])
@in_ranks(2, "nodes", fresh=True)
def test_the_error_for_a_lost_peer_has_the_words_of_gloo(rank: int, world: int, call: str) -> None:
    dist.barrier()
    if rank == 1:
        dist.destroy_process_group()
        return
    with pytest.raises(RuntimeError, match="Connection closed by peer"):
        dist.recv(torch.ones(1), 1) if call == "recv" else dist.all_reduce(torch.ones(1))
