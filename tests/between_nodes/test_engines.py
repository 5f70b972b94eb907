"""Engines: what moves the data of collectives between nodes in place of our own TCP connections (OURS_INTERNODE)."""

from __future__ import annotations

import datetime
import hashlib
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ddp_cases import trained_parameters
from patience import check_soon
from probes import killed_in_the_middle, reached, refused_to_join, threads_named, total
from programs import job, run_programs
from ranks import in_ranks, run_ranks

from ourddp import engines

COUNTS = (1, 1000, 4099, 5 * 2**18 + 3)  # the last is a bit more than 5 MiB of float32
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int32, torch.uint8)
# Who shares a node: two of two, one of one, and nodes of different sizes.
LAYOUTS = ("aabb", "ab", "aabccc")

pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="this torch has no Gloo to try")


def environments(layout: str, engine: str) -> list[dict[str, str]]:
    return [{"OURS_NODE_ID": node, "OURS_INTERNODE": engine} for node in layout]


def run(layout: str, engine: str, fn: Any, *args: Any, **keywords: Any) -> list[Any]:
    return run_ranks(len(layout), fn, *args, env=environments(layout, engine), **keywords)


def values(rank: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """Return values whose sum depends on the order of its terms, where the type rounds."""
    random = torch.Generator().manual_seed(rank * 1000 + count)
    if dtype.is_floating_point:
        return torch.randn(count, generator=random).to(dtype)
    return torch.randint(0, 20, (count,), generator=random).to(dtype)


def digest(*tensors: torch.Tensor) -> str:
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.contiguous().view(torch.uint8).numpy())
    return found.hexdigest()


def all_calls(rank: int, world: int) -> dict[str, str]:
    """Return a digest of what each collective gives this rank, by its name, type and size."""
    results = {}
    for dtype in DTYPES:
        for count in COUNTS if dtype == torch.float32 else COUNTS[1:3]:
            mine = values(rank, count, dtype)
            reduced = mine.clone()
            dist.all_reduce(reduced)
            results[f"all_reduce {dtype} {count}"] = digest(reduced)
    for count in COUNTS:
        mine = values(rank, count, torch.float32)
        root = count % world
        copy = mine.clone()
        dist.broadcast(copy, root)
        assert torch.equal(copy, values(root, count, torch.float32))
        reduced = mine.clone()
        dist.reduce(reduced, root)
        gathered = torch.empty(world * count)
        getattr(dist, "all_gather_single", dist.all_gather_into_tensor)(gathered, mine)
        assert torch.equal(gathered, torch.cat([values(r, count, torch.float32) for r in range(world)]))
        scattered = torch.empty(count)
        dist.reduce_scatter_tensor(scattered, gathered * (rank + 1))
        # Rank s sends count + s + d elements to rank d.
        sends = [values(rank * world + d, count + rank + d, torch.float32) for d in range(world)]
        exchanged = [torch.empty(count + s + rank) for s in range(world)]
        dist.all_to_all(exchanged, sends)
        for s in range(world):
            assert torch.equal(exchanged[s], values(s * world + rank, count + s + rank, torch.float32))
        collected = [torch.empty(count) for _ in range(world)]
        dist.gather(mine, collected if rank == root else None, root)
        dealt = torch.empty(count)
        dist.scatter(dealt, list(gathered.chunk(world)) if rank == root else None, root)
        assert torch.equal(dealt, mine)
        kept = [reduced, *collected] if rank == root else []
        results[f"others {count}"] = digest(gathered, scattered, *exchanged, *kept)
    dist.barrier()
    results["threads"] = str(len(threads_named("ours-engine")) > 0)
    return results


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gloo_gives_the_same_bits_as_tcp(layout):
    over_tcp = run(layout, "tcp", all_calls)
    over_gloo = run(layout, "gloo", all_calls)
    assert [results.pop("threads") for results in over_tcp] == ["False"] * len(layout)
    # Not every rank of a larger node sends to others.
    assert "True" in [results.pop("threads") for results in over_gloo]
    assert over_gloo == over_tcp


def test_gloo_gives_the_same_bits_on_hosts_of_their_own(network):
    both = []
    for engine in ("tcp", "gloo"):
        results = run_ranks(4, all_calls, nodes=network(2), env={"OURS_INTERNODE": engine})
        assert [one.pop("threads") for one in results] == [str(engine == "gloo")] * 4
        both.append(results)
    assert both[0] == both[1]


@in_ranks(4, env=environments("aabb", "GLOO"), fresh=True)
def test_groups_have_engines_of_their_own_that_end_with_them(rank: int, world: int) -> None:
    """Groups across nodes have engines of their own, used in turn and after the others' end."""
    members = [[0, 2], [1, 3], [0, 1, 3], [2, 3]]
    groups = [dist.new_group(ranks) for ranks in members]
    for _ in range(2):
        for group, ranks in zip(groups, members, strict=True):
            if rank in ranks:
                tensor = torch.full((300_000,), float(rank))
                dist.all_reduce(tensor, group=group)
                assert tensor.eq(sum(ranks)).all()
        assert total() == world
    for group, ranks in zip(groups, members, strict=True):
        if rank in ranks:
            dist.destroy_process_group(group)
    large = torch.ones(300_000)
    dist.all_reduce(large)
    assert large.eq(world).all()
    dist.destroy_process_group()
    assert reached(lambda: not threads_named("ours-engine"))


def test_training_gives_the_same_bits_as_over_tcp():
    over_gloo, over_tcp = (run("aabb", engine, trained_parameters, {}) for engine in ("gloo", "tcp"))
    assert len({digest(*parameters) for parameters in over_gloo + over_tcp}) == 1


# --- when things go wrong --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["aabb", "abc", "two hosts"])
def test_a_killed_rank_is_named_at_once(layout, request):
    on_hosts = layout == "two hosts"
    world = 4 if on_hosts else len(layout)
    where = {"nodes": request.getfixturevalue("network")(2), "env": {"OURS_INTERNODE": "gloo"}} if on_hosts else {}
    victim = world - 1

    def attempt() -> float:
        keywords = where or {"env": environments(layout, "gloo")}
        results = run_ranks(world, killed_in_the_middle, victim, 2_000_000, 3, killed=[victim], **keywords)
        for text, _ in results[:victim]:
            assert f"rank {victim} (host" in text
            assert "died" in text or on_hosts
        return max(seconds for _, seconds in results[:victim])

    check_soon(1, attempt)


def come_late(rank: int, world: int) -> tuple[str, float]:
    if rank == 0:
        backend = dist.group.WORLD._get_backend(torch.device("cpu"))
        assert reached(lambda: bool(backend.failure()))
    start = time.monotonic()
    with pytest.raises(dist.DistBackendError) as error:
        dist.all_reduce(torch.ones(2_000_000))
    return str(error.value), time.monotonic() - start


def test_a_late_rank_is_named_at_the_deadline():
    for text, seconds in run("abc", "gloo", come_late, pg_timeout=2):
        assert "for rank 0 (host" in text
        assert seconds < 5


@in_ranks(3, env=environments("aab", "gloo"), fresh=True)
def test_mismatches_are_found_before_anything_is_written(rank: int, world: int) -> None:
    tensor = torch.full((100_000 + (rank == 1),), 5.0)
    with pytest.raises(dist.DistBackendError, match="100000 x float32") as error:
        dist.all_reduce(tensor)
    assert tensor.eq(5).all()
    assert "100001 x float32" in str(error.value)


def why_not(*names: str) -> str:
    """Return the one error of two ranks on different nodes, with an engine each."""
    each = [{"OURS_NODE_ID": str(rank), "OURS_INTERNODE": name} for rank, name in enumerate(names)]
    results = run_ranks(len(names), refused_to_join, backend=None, env=each)
    assert len({text for text, _ in results}) == 1, "the ranks tell different stories"
    assert max(seconds for _, seconds in results) < 10
    return results[0][0]


@pytest.mark.parametrize(
    ("engines_of_ranks", "words"),
    [
        (("nosuch", "nosuch"), ["OURS_INTERNODE='nosuch'", "knows no such backend", "gloo"]),
        (("nccl", "nccl"), ["cannot send from CPU memory"]),
        (("ours", "ours"), ["knows no such backend"]),
        (("tcp", "gloo"), ["OURS_INTERNODE is 'tcp' on rank 0 and 'gloo' on rank 1"]),
    ],
)
def test_an_engine_that_cannot_be_is_an_error_on_all_ranks(engines_of_ranks, words):
    text = why_not(*engines_of_ranks)
    assert [word for word in words if word not in text] == [], text


# --- backends of others ----------------------------------------------------------------------------------------------


def make_foreign(store: dist.Store, rank: int, size: int, timeout: datetime.timedelta) -> Any:
    return engines._make_gloo(store, rank, size, timeout, "")


def over_a_foreign_backend(rank: int, world: int, extended: bool) -> list[float]:
    def make(options: Any, _: Any) -> Any:
        return make_foreign(options.store, options.group_rank, options.group_size, options.timeout)

    creator = make if extended else make_foreign
    dist.Backend.register_backend("Foreign", creator, extended_api=extended, devices=["cpu"])
    dist.init_process_group("ours")
    tensor = torch.ones(700_001)
    dist.all_reduce(tensor)
    assert tensor.eq(world).all()
    assert threads_named("ours-engine")
    sums = [total(), total()]
    dist.destroy_process_group()
    return sums


@pytest.mark.parametrize("extended", [False, True])
def test_a_registered_backend_is_an_engine_by_its_name(extended):
    env = environments("ab", "foreign")
    assert run_ranks(2, over_a_foreign_backend, extended, backend=None, env=env) == [[2.0, 2.0]] * 2


def die_over_a_foreign_backend(rank: int, world: int) -> tuple[str, float]:
    dist.Backend.register_backend("foreign", make_foreign, devices=["cpu"])
    dist.init_process_group("ours")
    return killed_in_the_middle(rank, world, world - 1, 2_000_000, 3)


def test_a_killed_rank_is_named_over_a_registered_backend():
    env = environments("abc", "foreign")
    for text, _ in run_ranks(3, die_over_a_foreign_backend, backend=None, env=env, killed=[2])[:2]:
        assert "rank 2 (host" in text


# --- the end ---------------------------------------------------------------------------------------------------------

PROGRAM = """
import os, sys
import torch, torch.distributed as dist
import ourddp
dist.init_process_group("ours")
for _ in range(3):
    tensor = torch.ones(1_000_000)
    dist.all_reduce(tensor)
    assert tensor.eq(2).all()
if sys.argv[1] == "destroy":
    dist.destroy_process_group()
if sys.argv[1] == "fork":
    child = os.fork()
    if child == 0:
        sys.exit(0)
    assert os.waitpid(child, 0)[1] == 0
    dist.all_reduce(tensor)
"""


@pytest.mark.parametrize("end", ["destroy", "leave", "fork"])
def test_programs_end_quietly(end):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    each = [{**rank, **engine} for rank, engine in zip(job(2, store), environments("ab", "gloo"), strict=True)]
    for done in run_programs(PROGRAM, each, argv=["program", end], whole_end=True):
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
