"""Errors that one rank meets alone, or between the operations of one collective: all ranks must hear of them."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks


def backend_of() -> Any:
    return dist.group.WORLD._get_backend(torch.device("cpu"))


def sparse_of_different_shapes(rank: int, world: int) -> tuple[str, str, str]:
    indices, size = torch.tensor([[0], [1]]), (3, 4 if rank == world - 1 else 5)
    tensor = torch.sparse_coo_tensor(indices, torch.ones(1), size, check_invariants=True)
    with pytest.raises(dist.DistBackendError) as error:
        dist.all_reduce(tensor)
    assert torch.equal(tensor.coalesce().values(), torch.ones(1))
    with pytest.raises(dist.DistBackendError) as again:
        dist.barrier()
    return str(error.value), str(again.value), backend_of().failure()


@pytest.mark.parametrize("world", [2, 3])
def test_sparse_tensors_of_different_shapes_fail_the_group_on_every_rank(world):
    for text, again, failure in run_ranks(world, sparse_of_different_shapes):
        assert re.search(rf"rank 0 has \(3, 5\).*rank {world - 1} has \(3, 4\)", text)
        assert failure in text
        assert failure
        assert failure in again
