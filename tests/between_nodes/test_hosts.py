"""Ranks on hosts of their own: shapes of jobs, bytes on the network, lost links and killed ranks."""

from __future__ import annotations

import contextlib
import io
import json
import runpy
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from collective_cases import ring_in_a_batch, same_bits, single_calls, tags_in_any_order, uneven_sizes
from hosts import payload_sent
from patience import check_soon
from probes import killed_in_the_middle
from ranks import RankPool, run_ranks


def sums_of_all_sizes(rank: int, world: int) -> None:
    for count in (1, 1000, 3_000_000):
        tensor = torch.full((count,), float(rank + 1))
        dist.all_reduce(tensor)
        assert tensor.eq(world * (world + 1) / 2).all()


SHAPES = [(4, 2), (5, 2), (8, 4), (8, 8)]  # ranks and nodes: 2 x 2, 3 + 2, 4 x 2, 8 x 1


@pytest.mark.parametrize("on_hosts", [False, True], ids=["played", "hosts"])
@pytest.mark.parametrize(("world", "count"), SHAPES)
def test_nodes_of_any_shape(network, world, count, on_hosts):
    nodes = network(count) if on_hosts else count
    with RankPool(world, nodes=nodes) as ranks:
        for contract in (sums_of_all_sizes, single_calls, uneven_sizes, ring_in_a_batch, tags_in_any_order):
            ranks.run(contract)
        assert len(set(ranks.run(same_bits))) == 1


def count_bytes(rank: int, world: int, count: int) -> dict[str, int]:
    """Return the bytes that this rank's host sends for collectives of ``count`` float32 numbers on each rank.

    Each is the least of three attempts.
    """
    whole = torch.ones(count)
    parts = [torch.ones(count) for _ in range(world)]
    calls = {
        "all_reduce": lambda: dist.all_reduce(whole),
        "reduce": lambda: dist.reduce(whole, world - 1),
        "broadcast": lambda: dist.broadcast(whole, 0),
        "all_gather": lambda: dist.all_gather(parts, whole),
        "reduce_scatter": lambda: dist.reduce_scatter(whole, parts),
        "all_to_all": lambda: dist.all_to_all([torch.empty(count) for _ in range(world)], parts),
        "gather": lambda: dist.gather(whole, parts if rank == 0 else None),
        "scatter": lambda: dist.scatter(whole, parts if rank == 0 else None),
    }
    dist.barrier()
    sent = {}
    for name, call in calls.items():
        call()  # opens the connections
        attempts = []
        for _ in range(3):
            dist.barrier()
            before = payload_sent()
            dist.barrier()
            call()
            dist.barrier()
            attempts.append(payload_sent() - before)
        sent[name] = min(attempts)  # it is more if a busy host acknowledged late, and TCP sent again what had arrived
        dist.barrier()
    return sent


@pytest.mark.parametrize("count", [2, 3])
def test_no_byte_crosses_the_network_twice(network, count):
    elements, local = 1_000_000, 2
    world = count * local
    results = run_ranks(world, count_bytes, elements, nodes=network(count, 1000))
    size, others = 4 * elements, count - 1
    expected = {  # for each host
        "all_reduce": [2 * others / count * size] * count,
        "reduce": [size] * others + [others / count * size],  # the root is on the last host
        "all_gather": [others * local * size] * count,
        "reduce_scatter": [others * local * size] * count,
        "all_to_all": [others * local * local * size] * count,
        "gather": [0] + [local * size] * others,
        "scatter": [others * local * size] + [0] * others,
    }
    for name, wanted in expected.items():
        sent = [results[host * local][name] for host in range(count)]
        # The barriers are counted, too.
        assert sent == [pytest.approx(each, rel=0.03, abs=0.01 * sum(wanted)) for each in wanted], name
    assert sum(results[host * local]["broadcast"] for host in range(count)) == pytest.approx(others * size, rel=0.03)


def lose_the_link(rank: int, world: int) -> tuple[str, float]:
    tensor = torch.ones(100_000)
    for i in range(200):
        if i == 20 and rank == 2:
            subprocess.run(["ip", "link", "set", "eth0", "down"], check=True, timeout=20)
        start = time.monotonic()
        try:
            dist.all_reduce(tensor.fill_(1))
        except dist.DistBackendError as error:
            return str(error), time.monotonic() - start
        except dist.DistNetworkError as error:
            return str(error), time.monotonic() - start
    raise AssertionError("nobody noticed")


def test_all_ranks_notice_a_link_that_goes_down_within_the_timeout(hosts):
    results = run_ranks(4, lose_the_link, nodes=hosts, pg_timeout=3)
    for rank, (text, seconds) in enumerate(results):
        there = [(2, "host1"), (3, "host1")] if rank < 2 else [(0, "host0"), (1, "host0")]
        assert any(f"rank {other} (host {host}," in text for other, host in there), (rank, text)
        assert seconds < 4.5, (rank, text)


def test_a_killed_rank_is_named_within_a_second_on_every_host(hosts):
    def attempt() -> float:
        results = run_ranks(4, killed_in_the_middle, 3, 100_000, 20, nodes=hosts, killed=[3])
        for text, _ in results[:3]:
            assert "rank 3 (host host1," in text, text
        return max(seconds for _, seconds in results[:3])

    check_soon(1, attempt)


def train_an_example(rank: int, world: int, metrics: str) -> None:
    examples = Path(__file__).resolve().parents[2] / "examples"
    sys.path.insert(0, str(examples))
    sys.argv = ["train.py", "--no-progress", "--epochs", "2", "--metrics", metrics]
    with contextlib.redirect_stdout(io.StringIO()):
        runpy.run_path(str(examples / "train.py"), run_name="__main__")


def test_an_example_reaches_the_same_loss_on_two_hosts_as_on_one(hosts, tmp_path):
    losses = []
    for name, places in (("one", hosts[:1]), ("two", hosts)):
        metrics = tmp_path / name
        run_ranks(4, train_an_example, str(metrics), backend=None, nodes=places)
        losses.append([json.loads(line)["train"]["loss"] for line in metrics.read_text().splitlines()])
    assert len(losses[0]) == 2
    assert losses[0][1] < losses[0][0]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
