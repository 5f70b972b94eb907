"""torch.ops.symm_mem on the CPU: collectives on tensors in symmetric memory, and writes of words."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.distributed as dist
from probes import HAS_HOOKS
from ranks import in_ranks

pytestmark = pytest.mark.skipif(not HAS_HOOKS, reason="the package has symmetric memory from torch 2.15 on")

with contextlib.suppress(ImportError):
    import torch.distributed._symmetric_memory as symm_mem

COUNTS = [0, 1, 7, 1000, 100_003]


def values(rank: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """Return numbers whose sums are exact, other ones for each rank."""
    return ((torch.arange(count) * (rank + 1)) % 13 - 6).to(dtype)


def total(world: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    return sum(values(rank, count, torch.float64) for rank in range(world)).to(dtype)


def inside(rank: int, count: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a tensor in symmetric memory, and the part of it that has the values. The rest is 9."""
    whole = symm_mem.empty(count + 8, dtype=dtype, device="cpu").fill_(9)
    part = whole[3 : 3 + count]
    part.copy_(values(rank, count, dtype))
    return whole, part


def check_around(whole: torch.Tensor) -> None:
    assert whole[:3].eq(9).all()
    assert whole[-5:].eq(9).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("world", [1, 2, 3])
@in_ranks()
def test_all_reduces_add_up_the_tensors_of_all_ranks(rank, world, dtype):
    ops = torch.ops.symm_mem
    for count in COUNTS:
        expected = total(world, count, dtype)
        whole, part = inside(rank, count, dtype)
        assert torch.equal(ops.one_shot_all_reduce(part, "sum", "0"), expected)
        out = torch.empty_like(part)
        assert ops.one_shot_all_reduce_out(part, "sum", "0", out).data_ptr() == out.data_ptr()
        assert torch.equal(out, expected)
        assert torch.equal(part, values(rank, count, dtype))

        out.zero_()
        assert torch.equal(ops.two_shot_all_reduce_out(part, "sum", "0", out), expected)
        part.copy_(values(rank, count, dtype))
        dist.barrier()
        assert torch.equal(ops.two_shot_all_reduce_(part, "sum", "0"), expected)
        assert torch.equal(part, expected)

        part.zero_()
        dist.barrier()
        own = values(rank, count, dtype)
        assert torch.equal(ops.one_shot_all_reduce_copy(part, own, "sum", "0"), expected)
        out.zero_()
        ops.one_shot_all_reduce_copy_out(part, own, "sum", "0", out)
        assert torch.equal(out, expected)
        check_around(whole)


@pytest.mark.parametrize("world", [1, 2, 3])
@in_ranks()
def test_reduce_scatters_give_each_rank_its_part(rank, world):
    ops = torch.ops.symm_mem
    for rows, width in ((1, 1), (5, 40), (4, 1000)):
        count = rows * width * world
        whole, part = inside(rank, count, torch.float32)
        expected = total(world, count, torch.float32)
        out = torch.empty(count // world)
        ops.reduce_scatter_out(part, "0", False, out)
        assert torch.equal(out, expected.chunk(world)[rank])
        out = torch.empty(rows, width)
        ops.reduce_scatter_out(part.view(rows, width * world), "0", True, out)
        assert torch.equal(out, expected.view(rows, width * world).chunk(world, dim=1)[rank])

        for tensor in (part.view(rows * world, width), values(rank, count, torch.float32).view(rows * world, width)):
            mean = expected.view(rows * world, width).chunk(world)[rank] / world
            assert torch.allclose(ops._low_contention_reduce_scatter(tensor, "avg", "0"), mean)
            assert torch.equal(ops._low_contention_reduce_scatter(tensor, "sum", "0") / world, mean)
            gathered = ops._low_contention_all_gather(tensor, "0")
            gathered = torch.ops._c10d_functional.wait_tensor(gathered)
            everything = [values(r, count, torch.float32).view(rows * world, width) for r in range(world)]
            assert torch.equal(gathered, torch.cat(everything))
        check_around(whole)
    dist.barrier()


@in_ranks(2)
def test_words_are_written_into_signal_pads(rank, world):
    tensor = symm_mem.empty(1, device="cpu")
    handle = symm_mem.rendezvous(tensor, dist.group.WORLD)
    pad = handle.get_signal_pad(1 - rank)
    words = type(handle)
    words.memset32(pad, offset=100, val=7, count=3)
    words.stream_write_value32(pad, offset=103, val=2**32 - 1)
    handle.barrier()
    assert handle.get_signal_pad(rank)[99:105].tolist() == [0, 7, 7, 7, 2**32 - 1, 0]
    for arguments in ((pad, -1, 1, 1), (pad, pad.numel(), 1, 1), (pad, 0, 2**32, 1), (pad, 0, 1, 0), (tensor, 0, 1, 1)):
        with pytest.raises(ValueError, match="memset32_"):
            words.memset32(*arguments)
    handle.barrier()


@in_ranks(2)
def test_what_has_no_meaning_is_refused(rank, world):
    ops = torch.ops.symm_mem
    _, part = inside(rank, 6, torch.float32)
    wrong = [
        (lambda: ops.one_shot_all_reduce(part, "max", "0"), "the reduction is 'max'"),
        (lambda: ops.one_shot_all_reduce_out(part, "sum", "0", torch.empty(5)), "output has to be .* of 6 elements"),
        (lambda: ops.two_shot_all_reduce_(part.view(2, 3).T, "sum", "0"), "not contiguous"),
        (lambda: ops.two_shot_all_reduce_(torch.ones(6), "sum", "0"), "not in symmetric memory"),
        (lambda: ops.reduce_scatter_out(part[:5], "0", False, torch.empty(2)), "not divisible by the 2 ranks"),
        (lambda: ops._low_contention_reduce_scatter(part[:5], "sum", "0"), "cannot be split among 2 ranks"),
        (lambda: ops._low_contention_reduce_scatter(part, "max", "0"), "only 'sum' and 'avg'"),
        (lambda: ops.one_shot_all_reduce_copy(part, torch.ones(7), "sum", "0"), "has 6 elements, and the input 7"),
    ]
    for call, why in wrong:
        with pytest.raises(ValueError, match=why):
            call()
    assert torch.equal(ops.one_shot_all_reduce(part, "sum", "0"), total(world, 6, torch.float32))
