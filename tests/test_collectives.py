"""Every collective against Gloo, against a model of it, and in the corners."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ranks import gloo_group, run_ranks
from torch.testing import assert_close

WORLDS = [1, 2, 3, 4, 7]
PROPERTY = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))

INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
UNSIGNED = [torch.uint16, torch.uint32, torch.uint64]
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
COMPLEX = [torch.complex64, torch.complex128]
FP8 = [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu]
MOVABLE = [torch.bool, *INTEGERS, *UNSIGNED, *FLOATS, torch.complex32, *COMPLEX, *FP8]

OPS = {
    "SUM": dist.ReduceOp.SUM,
    "AVG": dist.ReduceOp.AVG,
    "PRODUCT": dist.ReduceOp.PRODUCT,
    "MIN": dist.ReduceOp.MIN,
    "MAX": dist.ReduceOp.MAX,
    "BAND": dist.ReduceOp.BAND,
    "BOR": dist.ReduceOp.BOR,
    "BXOR": dist.ReduceOp.BXOR,
}


def ops_of(dtype: torch.dtype) -> list[str]:
    """The reductions that have a meaning for ``dtype``, but for PREMUL_SUM."""
    if dtype.is_complex:
        return ["SUM", "AVG"]  # PRODUCT, too, but torch's functions do not let it through
    if dtype.is_floating_point:
        return ["SUM", "AVG", "PRODUCT", "MIN", "MAX"]
    if dtype is torch.bool:
        return ["SUM", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR"]
    return list(OPS)


# ---------------------------------------------------------------- data that every rank can make for every rank


def values(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Small random values, exact in every type that can hold them, and never zero where that would hide a product."""
    generator = torch.Generator().manual_seed(seed)
    if dtype is torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    whole = torch.randint(1, 4, shape, generator=generator)
    if dtype.is_complex:
        other = torch.randint(-2, 3, shape, generator=generator)
        return torch.complex(whole.double(), other.double()).to(dtype)
    if dtype.is_floating_point and dtype not in FP8:
        return (whole.double() * torch.randint(0, 2, shape, generator=generator).mul(2).sub(1)).to(dtype)
    return whole.float().to(dtype) if dtype in FP8 else whole.to(dtype)


def laid_out(tensor: torch.Tensor, layout: str) -> torch.Tensor:
    """The same elements in memory of another layout."""
    if layout == "transposed" and tensor.dim() >= 2:
        return tensor.transpose(0, -1).contiguous().transpose(0, -1)
    if layout == "strided" and tensor.dim() >= 1:
        wide = torch.empty((*tensor.shape, 2), dtype=tensor.dtype)
        view = wide[..., 0]
        view.copy_(tensor)
        return view
    if layout == "offset":
        padded = torch.empty(tensor.numel() + 3, dtype=tensor.dtype)
        view = padded[3:].view(tensor.shape)
        view.copy_(tensor)
        return view
    return tensor.clone()


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor, which compare for every type, NaN included."""
    flat = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    # A clone: where the size is 1, contiguous() keeps strides that no view to another type accepts.
    return flat.clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)


def reduced(inputs: list[torch.Tensor], op: str) -> torch.Tensor:
    """What the reduction of ``inputs`` must be."""
    dtype = inputs[0].dtype
    wide = torch.complex128 if dtype.is_complex else torch.float64 if dtype.is_floating_point else torch.int64
    result = inputs[0].to(wide)
    for tensor in inputs[1:]:
        other = tensor.to(wide)
        if op in ("SUM", "AVG"):
            result = result + other
        elif op == "PRODUCT":
            result = result * other
        elif op in ("MIN", "MAX"):
            result = torch.minimum(result, other) if op == "MIN" else torch.maximum(result, other)
        else:
            result = {"BAND": result & other, "BOR": result | other, "BXOR": result ^ other}[op]
    if op == "AVG":
        size = len(inputs)
        result = (
            result / size
            if dtype.is_floating_point or dtype.is_complex
            else torch.div(result, size, rounding_mode="trunc")
        )
    return result != 0 if dtype is torch.bool else result.to(dtype)


# ---------------------------------------------------------------- every call, compared with Gloo


def every_call(group: dist.ProcessGroup | None, rank: int, world: int) -> dict[str, Any]:
    """Run every collective that Gloo has, too, and return what came out."""
    out: dict[str, Any] = {}
    mine = torch.arange(6, dtype=torch.float32).view(2, 3) + 10 * rank

    for root in range(world):
        tensor = mine.clone()
        dist.broadcast(tensor, group_src=root, group=group)
        out[f"broadcast from {root}"] = tensor
        tensor = mine.clone()
        dist.reduce(tensor, group_dst=root, group=group)
        out[f"reduce to {root}"] = tensor if rank == root else None
        gathered = [torch.empty_like(mine) for _ in range(world)] if rank == root else None
        dist.gather(mine, gathered, group_dst=root, group=group)
        out[f"gather to {root}"] = gathered
        parts = [mine + r for r in range(world)] if rank == root else None
        tensor = torch.empty_like(mine)
        dist.scatter(tensor, parts, group_src=root, group=group)
        out[f"scatter from {root}"] = tensor

    for name in ("SUM", "PRODUCT", "MIN", "MAX"):
        tensor = mine.clone()
        dist.all_reduce(tensor, OPS[name], group=group)
        out[f"all_reduce {name}"] = tensor
    for name in ("BAND", "BOR", "BXOR"):
        tensor = mine.long()
        dist.all_reduce(tensor, OPS[name], group=group)
        out[f"all_reduce {name}"] = tensor

    gathered = [torch.empty_like(mine) for _ in range(world)]
    dist.all_gather(gathered, mine, group=group)
    out["all_gather"] = gathered
    whole = torch.empty(2 * world, 3)
    dist.all_gather_into_tensor(whole, mine, group=group)
    out["all_gather_into_tensor"] = whole
    piece = torch.empty_like(mine)
    dist.reduce_scatter(piece, [mine * (r + 1) for r in range(world)], group=group)
    out["reduce_scatter"] = piece
    piece = torch.empty(2, 3)
    dist.reduce_scatter_tensor(piece, torch.cat([mine * (r + 1) for r in range(world)]), group=group)
    out["reduce_scatter_tensor"] = piece

    received = [torch.empty(2) for _ in range(world)]
    dist.all_to_all(received, [torch.full((2,), float(rank * world + d)) for d in range(world)], group=group)
    out["all_to_all"] = received
    exchanged = torch.empty(world, 2)
    dist.all_to_all_single(exchanged, torch.arange(2.0 * world).view(world, 2) + 100 * rank, group=group)
    out["all_to_all_single"] = exchanged
    total = sum(s + 1 for s in range(world))
    uneven = torch.empty((rank + 1) * world, 2)
    dist.all_to_all_single(
        uneven,
        torch.arange(2.0 * total).view(total, 2) + 100 * rank,
        output_split_sizes=[rank + 1] * world,
        input_split_sizes=[d + 1 for d in range(world)],
        group=group,
    )
    out["all_to_all_single, uneven"] = uneven

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the coalesced calls are deprecated, and still to work
        tensors = [mine.clone(), torch.full((4,), float(rank))]
        dist.all_reduce_coalesced(tensors, group=group)
        out["all_reduce_coalesced"] = tensors
        lists = [[torch.empty_like(mine), torch.empty(1)] for _ in range(world)]
        dist.all_gather_coalesced(lists, [mine, torch.tensor([float(rank)])], group=group)
        out["all_gather_coalesced"] = lists

    sparse = torch.sparse_coo_tensor([[0, rank % 3, 0]], [1.0, 2.0, 3.0], (4,), check_invariants=True)
    dist.all_reduce(sparse, group=group)
    out["all_reduce of a sparse tensor"] = sparse.to_dense()

    objects: list[Any] = [None] * world
    dist.all_gather_object(objects, {"rank": rank, "text": "x" * rank}, group=group)
    out["all_gather_object"] = objects
    shared = [rank, "from", 0] if rank == 0 else [None, None, None]
    dist.broadcast_object_list(shared, group_src=0, group=group)
    out["broadcast_object_list"] = shared
    dist.barrier(group=group)
    return out


def compare_every_call(rank: int, world: int) -> int:
    ours = every_call(None, rank, world)
    gloo = every_call(gloo_group(), rank, world)
    assert ours.keys() == gloo.keys()
    for name, expected in gloo.items():
        assert_close(ours[name], expected, msg=lambda text, name=name: f"{name}: {text}") if isinstance(
            expected, torch.Tensor
        ) else compare_nested(name, ours[name], expected)
    return len(ours)


def compare_nested(name: str, got: Any, expected: Any) -> None:
    if isinstance(expected, torch.Tensor):
        assert torch.equal(got, expected), f"{name}: {got} instead of {expected}"
    elif isinstance(expected, list):
        assert len(got) == len(expected)
        for one, other in zip(got, expected, strict=True):
            compare_nested(name, one, other)
    else:
        assert got == expected, name


@pytest.mark.parametrize("world", WORLDS)
def test_every_call_equals_gloo(rank_pool, world):
    assert min(rank_pool(world).run(compare_every_call)) > 20


# ---------------------------------------------------------------- properties


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


SHAPES = st.one_of(
    st.just(()),
    st.lists(st.integers(0, 5), min_size=1, max_size=4).map(tuple),
    st.integers(1, 70_000).map(lambda n: (n,)),
)
LAYOUTS = st.sampled_from(["contiguous", "transposed", "strided", "offset"])


@PROPERTY
@given(data=st.data())
def test_reductions_equal_the_model(rank_pool, data):
    dtype = data.draw(st.sampled_from([torch.bool, *INTEGERS, *UNSIGNED, *FLOATS, *COMPLEX]))
    op = data.draw(st.sampled_from(ops_of(dtype)))
    if dtype in (torch.uint64,) and op in ("AVG", "MIN", "MAX"):
        op = "SUM"  # the model has no unsigned division
    call = data.draw(st.sampled_from(["all_reduce", "reduce", "reduce_scatter", "reduce_scatter_tensor"]))
    world = data.draw(st.sampled_from([1, 2, 3, 4]))
    shape = data.draw(SHAPES)
    rank_pool(world).run(run_reduction, call, dtype, op, shape, data.draw(LAYOUTS), data.draw(st.integers(0, 99)))


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


@PROPERTY
@given(data=st.data())
def test_movement_keeps_every_bit(rank_pool, data):
    call = data.draw(st.sampled_from(["broadcast", "all_gather", "gather", "scatter", "all_to_all", "send"]))
    world = data.draw(st.sampled_from([1, 2, 3, 4]))
    dtype = data.draw(st.sampled_from(MOVABLE))
    shape = data.draw(SHAPES)
    rank_pool(world).run(run_movement, call, dtype, shape, data.draw(LAYOUTS), data.draw(st.integers(0, 99)))


def run_async(rank: int, world: int, calls: list[tuple[str, int]], waits: list[int]) -> None:
    """Issue all calls without waiting, then wait in the order of ``waits``, which differs between the ranks."""
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


@PROPERTY
@given(data=st.data())
def test_asynchronous_calls_complete_in_any_order_of_waiting(rank_pool, data):
    call = st.tuples(
        st.sampled_from(["all_reduce", "all_reduce sync", "broadcast", "all_gather"]),
        st.sampled_from([0, 1, 3, 1000, 30_000, 200_000]),
    )
    calls = data.draw(st.lists(call, min_size=1, max_size=8))
    waits = data.draw(st.lists(st.integers(0, 100), min_size=8, max_size=8))
    rank_pool(data.draw(st.sampled_from([2, 3]))).run(run_async, calls, waits)


# ---------------------------------------------------------------- types and operations


def premul_sum(rank: int, world: int) -> None:
    for factor in (0.5, torch.tensor(0.25, dtype=torch.float64)):
        for dtype in (torch.float32, torch.float64, torch.bfloat16):
            tensor = torch.full((5,), float(rank + 1), dtype=dtype)
            dist.all_reduce(tensor, dist._make_nccl_premul_sum(factor))
            assert_close(tensor, torch.full((5,), float(factor) * sum(range(1, world + 1)), dtype=dtype))


@pytest.mark.parametrize("world", [1, 3])
def test_premul_sum_takes_numbers_and_tensors(rank_pool, world):
    rank_pool(world).run(premul_sum)


def half_accumulation(rank: int, world: int) -> None:
    # In bfloat16, 256 + 1 is 256: added one by one in that type, the ones would all be lost.
    tensor = torch.tensor([256.0 if rank == 0 else 1.0], dtype=torch.bfloat16)
    dist.all_reduce(tensor)
    assert tensor.item() == torch.tensor(256.0 + world - 1, dtype=torch.bfloat16).item()


def test_half_types_are_added_in_single_precision(rank_pool):
    rank_pool(7).run(half_accumulation)


def meaningless_reductions(rank: int, world: int) -> list[str]:
    texts = []
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
        texts.append(str(error.value))
    # The group is none the worse for it.
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    assert tensor.item() == world
    return texts


def all_reduce_raw(tensor: torch.Tensor, op: str) -> None:
    """all_reduce without torch's reinterpretation of complex numbers as pairs."""
    options = dist.AllreduceOptions()
    options.reduceOp = OPS[op]
    dist.group.WORLD.allreduce([tensor], options).wait()


def test_meaningless_reductions_raise_and_name_the_alternatives(rank_pool):
    first, second = rank_pool(2).run(meaningless_reductions)
    assert first == second
    assert "BAND" in first[0]
    assert "float32" in first[0]


def conjugates(rank: int, world: int) -> None:
    # On the backend itself: torch's functions reinterpret complex numbers as pairs, which such views do not allow.
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
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


def test_lazy_conjugation_and_negation_are_resolved(rank_pool):
    rank_pool(2).run(conjugates)


def uneven_sizes(rank: int, world: int) -> None:
    mine = torch.full((rank + 1, 2), float(rank))
    everyone = [torch.empty(r + 1, 2) for r in range(world)]
    dist.all_gather(everyone, mine)
    assert all(torch.equal(t, torch.full((r + 1, 2), float(r))) for r, t in enumerate(everyone))
    gathered = [torch.empty(r + 1, 2) for r in range(world)] if rank == 1 else None
    dist.gather(mine, gathered, 1)
    if gathered is not None:
        assert all(torch.equal(t, torch.full((r + 1, 2), float(r))) for r, t in enumerate(gathered))
    piece = torch.empty(rank + 1)
    dist.reduce_scatter(piece, [torch.full((r + 1,), float(r + 10 * rank)) for r in range(world)])
    assert torch.equal(piece, torch.full((rank + 1,), float(rank * world + 10 * sum(range(world)))))
    received = [torch.empty(s, rank) for s in range(world)]
    dist.all_to_all(received, [torch.full((rank, d), float(rank * world + d)) for d in range(world)])
    assert all(torch.equal(t, torch.full((s, rank), float(s * world + rank))) for s, t in enumerate(received))
    parts = [torch.full((r,), float(r)) for r in range(world)] if rank == 0 else None
    part = torch.empty(rank)
    dist.scatter(part, parts, 0)
    assert torch.equal(part, torch.full((rank,), float(rank)))


@pytest.mark.parametrize("world", [2, 3])
def test_sizes_may_differ_between_ranks(rank_pool, world):
    rank_pool(world).run(uneven_sizes)


def single_calls(rank: int, world: int) -> None:
    """The calls that only the backend object has, or that go by several names."""
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    options = dist.GatherOptions()
    options.rootRank = world - 1
    gather = getattr(dist.group.WORLD, "gather_single", None) or getattr(dist.group.WORLD, "gather_into_tensor", None)
    if gather is not None:
        whole = torch.empty(2 * world) if rank == world - 1 else torch.empty(0)
        gather(whole, torch.full((2,), float(rank)), options).wait()
        if rank == world - 1:
            assert torch.equal(whole, torch.arange(world).repeat_interleave(2).float())
    assert backend.supports_coalescing
    with dist._coalescing_manager(async_ops=True) as manager:
        tensors = [torch.full((n,), float(rank + 1)) for n in (1, 400_000, 3)]
        for tensor in tensors:
            dist.all_reduce(tensor)
    manager.wait()
    assert all(torch.equal(t, torch.full_like(t, sum(range(1, world + 1)))) for t in tensors)
    with dist._coalescing_manager():
        wholes = [torch.empty(world * n) for n in (1, 3)]
        for n, whole in zip((1, 3), wholes, strict=True):
            dist.all_gather_into_tensor(whole, torch.full((n,), float(rank)))
    assert torch.equal(wholes[1], torch.arange(world).repeat_interleave(3).float())
    with dist._coalescing_manager():
        pieces = [torch.empty(n) for n in (1, 3)]
        for n, piece in zip((1, 3), pieces, strict=True):
            dist.reduce_scatter_tensor(piece, torch.ones(world * n))
    assert torch.equal(pieces[1], torch.full((3,), float(world)))
    with dist._coalescing_manager(device=torch.device("cpu"), async_ops=True) as manager:
        one, two = torch.full((1,), float(rank)), torch.full((2,), float(rank))
        dist.broadcast(one, 0, async_op=True)
        dist.broadcast(two, world - 1, async_op=True)
    manager.wait()
    assert one.item() == 0
    assert two[1].item() == world - 1


@pytest.mark.parametrize("world", [1, 3])
def test_coalescing_and_single_tensor_calls(rank_pool, world):
    rank_pool(world).run(single_calls)


def sparse_cases(rank: int, world: int) -> None:
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
    with pytest.raises(ValueError, match="SUM and AVG"):
        dist.all_reduce(torch.sparse_coo_tensor([[0]], [1.0], (2,), check_invariants=True), dist.ReduceOp.MAX)
    with pytest.raises(ValueError, match=r"to_dense"):
        backend = dist.group.WORLD._get_backend(torch.device("cpu"))
        backend.broadcast([torch.sparse_coo_tensor([[0]], [1.0], (2,), check_invariants=True)], dist.BroadcastOptions())


@pytest.mark.parametrize("world", [1, 3])
def test_sparse_all_reduce(rank_pool, world):
    rank_pool(world).run(sparse_cases)


# ---------------------------------------------------------------- misuse


def misuse(rank: int, world: int) -> None:
    group = dist.group.WORLD
    expanded = torch.zeros(1).expand(4)
    window = torch.zeros(9).as_strided((3, 4), (1, 2))
    meta = torch.zeros(2, device="meta")
    backend = group._get_backend(torch.device("cpu"))
    wrong_root = dist.BroadcastOptions()
    wrong_root.rootRank = world
    calls = [
        (lambda: dist.all_reduce(expanded), r"share memory .*contiguous"),
        (lambda: dist.all_reduce(window), r"share memory"),
        (lambda: backend.allreduce([meta]), r"is on meta"),
        (lambda: backend.allreduce([torch.zeros(1), torch.zeros(1)]), r"expected one tensor .* got 2"),
        (lambda: backend.broadcast([torch.zeros(1)], wrong_root), rf"root is {world} in a group of {world}"),
        (
            lambda: dist.all_gather_into_tensor(torch.zeros(2 * world + 1), torch.zeros(2)),
            rf"{2 * world + 1} elements.*needs {2 * world}",
        ),
        (lambda: dist.reduce_scatter_tensor(torch.zeros(2), torch.zeros(2 * world + 2)), rf"{2 * world + 2} elements"),
        (
            lambda: group.allgather([[torch.zeros(1)] * (world + 1)], [torch.zeros(1)]),
            rf"has {world + 1} tensors in a group of {world}",
        ),
        (
            lambda: dist.all_to_all_single(torch.zeros(world + 1), torch.zeros(world + 1)),
            r"divided equally.*split_sizes",
        ),
        (
            lambda: dist.all_to_all_single(torch.zeros(world), torch.zeros(world), [1] * world, [2] * world),
            rf"add up to {2 * world}, but dimension 0 of the input has {world}",
        ),
    ]
    for call, text in calls:
        with pytest.raises(ValueError, match=text):
            call()
    dist.barrier()


def test_misuse_raises_value_error_with_both_values(rank_pool):
    rank_pool(2).run(misuse)


# ---------------------------------------------------------------- size and order


def huge(rank: int, world: int) -> None:
    count = 2**31 + 17
    tensor = torch.full((count,), rank + 1, dtype=torch.uint8)
    dist.all_reduce(tensor)
    for place in (0, 1, 2**30, 2**31 - 1, 2**31, count - 1):
        assert tensor[place] == 3, place
    tensor[-1] = 40 + rank
    dist.broadcast(tensor, 1)
    assert tensor[-1] == 41


def test_tensors_beyond_two_gibibytes():
    run_ranks(2, huge, timeout=200)


def same_bits(rank: int, world: int) -> bytes:
    generator = torch.Generator().manual_seed(rank)
    whole = torch.randn(100_003, generator=generator)
    one_call = whole.clone()
    dist.all_reduce(one_call)
    for sizes in ([1, 100_002], [40_001, 60_002], [33_333, 33_333, 33_337]):
        pieces = list(whole.clone().split(sizes))
        for piece in pieces:
            dist.all_reduce(piece)
        assert torch.equal(torch.cat(pieces), one_call), f"the bits depend on the cut into {sizes}"
    return one_call.numpy().tobytes()


@pytest.mark.parametrize("world", [3, 4])
def test_sums_have_the_same_bits_on_all_ranks_and_for_any_cut(rank_pool, world):
    results = rank_pool(world).run(same_bits)
    again = rank_pool(world).run(same_bits)
    assert len({*results, *again}) == 1


def functional(rank: int, world: int) -> None:
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


def test_functional_collectives(rank_pool):
    rank_pool(3).run(functional)
