"""Types and reductions with rules of their own: scaled sums, half types, conjugates and sparse tensors."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from collective_model import FP8, OPS
from probes import backend_of
from ranks import in_ranks
from torch.testing import assert_close


@pytest.mark.parametrize("world", [1, 3])
@in_ranks(None, "nodes")
def test_premul_sum_accepts_numbers_and_tensors(rank: int, world: int) -> None:
    for factor in (0.5, torch.tensor(0.25, dtype=torch.float64)):
        for dtype in (torch.float32, torch.float64, torch.bfloat16):
            tensor = torch.full((5,), float(rank + 1), dtype=dtype)
            dist.all_reduce(tensor, dist._make_nccl_premul_sum(factor))
            assert_close(tensor, torch.full((5,), float(factor) * sum(range(1, world + 1)), dtype=dtype))


@in_ranks(7, "nodes")
def test_half_types_are_accumulated_in_float32(rank: int, world: int) -> None:
    # In bfloat16, 256 + 1 is 256: added one by one in that type, all ones would be lost.
    tensor = torch.tensor([256.0 if rank == 0 else 1.0], dtype=torch.bfloat16)
    dist.all_reduce(tensor)
    # With several nodes, the sum of each node is rounded, too: by at most half of a unit of 2.
    one_node = backend_of().node_sizes() == [world]
    assert abs(tensor.item() - (256.0 + world - 1)) <= (0 if one_node else 2)


@in_ranks(2, "nodes")
def test_undefined_reductions_raise_and_name_the_alternatives(rank: int, world: int) -> None:
    for dtype, op in [
        (torch.float32, "BAND"),
        (torch.complex64, "MAX"),
        (torch.float8_e4m3fn, "SUM"),
        (torch.float64, "BXOR"),
    ]:
        tensor = torch.zeros(3).to(dtype)
        with pytest.raises(ValueError, match=r"SUM|only be moved|cannot be reduced|no reduction") as error:
            dist.group.WORLD.allreduce([tensor], dist.AllreduceOptions()) if dtype in FP8 else all_reduce_raw(
                tensor, op
            )
        if op == "BAND":
            assert "BAND" in str(error.value)
            assert "float32" in str(error.value)
    # The group can still be used.
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    assert tensor.item() == world


def all_reduce_raw(tensor: torch.Tensor, op: str) -> None:
    """Call all_reduce without torch's reinterpretation of complex numbers as pairs."""
    options = dist.AllreduceOptions()
    options.reduceOp = OPS[op]
    dist.group.WORLD.allreduce([tensor], options).wait()


@in_ranks(2, "nodes")
def test_lazy_conjugation_and_negation_are_resolved(rank: int, world: int) -> None:
    # On the backend itself, since torch's functions reinterpret complex numbers as pairs, which these views refuse.
    backend = backend_of()
    base = torch.tensor([1 + 2j, 3 - 1j]) * (rank + 1)
    received = [torch.empty(2, dtype=torch.complex64) for _ in range(world)]
    backend.allgather([received], [base.conj()]).wait()
    for r, tensor in enumerate(received):
        assert_close(tensor, (torch.tensor([1 + 2j, 3 - 1j]) * (r + 1)).conj().resolve_conj())
    storage = torch.zeros(2, dtype=torch.complex64)
    options = dist.BroadcastOptions()
    backend.broadcast([base.clone() if rank == 0 else storage.conj()], options).wait()
    if rank != 0:  # written through a conjugating view
        assert_close(storage, torch.tensor([1 - 2j, 3 + 1j]))
    imaginary = torch.tensor([1 + 2j]).conj().imag  # a view that negates when read
    assert imaginary.is_neg()
    received = [torch.empty(1) for _ in range(world)]
    backend.allgather([received], [imaginary]).wait()
    assert all(tensor.item() == -2.0 for tensor in received)
    backend.allreduce([imaginary], dist.AllreduceOptions()).wait()
    assert imaginary.item() == -2.0 * world


@pytest.mark.parametrize("world", [1, 3])
@in_ranks(None, "nodes")
def test_sparse_all_reduce(rank: int, world: int) -> None:
    # Different numbers of entries, one rank without any, a dense dimension, duplicates.
    entries = rank * 2
    indices = torch.tensor([[i % 3, (i * rank) % 4] for i in range(entries)], dtype=torch.long).view(-1, 2).t()
    tensor = torch.sparse_coo_tensor(indices, torch.ones(entries, 5) * (rank + 1), (3, 4, 5), check_invariants=True)
    expected = torch.zeros(3, 4, 5)
    for r in range(world):
        for i in range(r * 2):
            expected[i % 3, (i * r) % 4] += r + 1
    dist.all_reduce(tensor)
    assert_close(tensor.to_dense(), expected)
    mean = torch.sparse_coo_tensor([[0]], [float(rank)], (2,), check_invariants=True)
    dist.all_reduce(mean, dist.ReduceOp.AVG)
    assert_close(mean.to_dense(), torch.tensor([(world - 1) / 2, 0.0]))
    for step in range(20):  # DDP reduces sparse and dense gradients at the same time
        both = [torch.sparse_coo_tensor([[rank]], [1.0 + step], (world,), check_invariants=True), torch.ones(3)]
        for work in [dist.all_reduce(tensor, async_op=True) for tensor in both]:
            work.wait()
        assert_close(both[0].to_dense(), torch.full((world,), 1.0 + step))
        assert_close(both[1], torch.full((3,), float(world)))
    with pytest.raises(ValueError, match="SUM and AVG"):
        dist.all_reduce(torch.sparse_coo_tensor([[0]], [1.0], (2,), check_invariants=True), dist.ReduceOp.MAX)
    with pytest.raises(ValueError, match=r"to_dense"):
        backend = backend_of()
        backend.broadcast([torch.sparse_coo_tensor([[0]], [1.0], (2,), check_invariants=True)], dist.BroadcastOptions())
