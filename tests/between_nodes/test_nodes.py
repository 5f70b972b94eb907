"""Ranks that share no memory, or only some of them: who counts as one node, and what differs for the others.

Most tests of what groups do run over two nodes, too (the fixture ``nodes``); here is what is about nodes alone.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import json
import os
import runpy
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from collective_cases import ring_in_a_batch, same_bits, single_calls, tags_in_any_order, uneven_sizes
from hosts import bytes_sent, linked_hosts, why_no_hosts
from patience import check_soon
from probes import backend_of, in_heap, killed_in_the_middle, total
from ranks import RankPool, run_ranks
from torch import nn

from ourddp import DistributedDataParallel

# --- who shares memory -----------------------------------------------------------------------------------------------


def shared_memory(rank: int, world: int) -> list[str]:
    """Return the inodes of what this process shares with ranks of its node, after all ranks have added up."""
    assert total() == world
    lines = Path("/proc/self/maps").read_text().splitlines()
    return sorted({line.split()[4] for line in lines if "/memfd:ours" in line})


def check_shared(found: list[list[str]], expected: str) -> None:
    """Compare who shares memory with a word in which ranks of one node have the same letter."""
    for one, mine in zip(found, expected, strict=True):
        assert bool(one) == (len(set(expected)) < len(expected))  # one rank a node: no memory at all
        for other, theirs in zip(found, expected, strict=True):
            assert (one == other) == (mine == theirs or not one)


@pytest.mark.parametrize("ids", ["aaa", "aab", "abc", "aba"])
def test_ranks_with_different_ids_are_of_different_nodes(ids):
    environments = [{"OURS_NODE_ID": one} for one in ids]
    check_shared(run_ranks(3, shared_memory, env=environments), ids)


def as_users(rank: int, world: int, users: list[int]) -> list[str]:
    """Join as another user, whose processes may be looked into by that user."""
    os.setuid(users[rank])
    assert ctypes.CDLL(None).prctl(4, 1, 0, 0, 0) == 0  # PR_SET_DUMPABLE, which a change of user takes away
    dist.init_process_group("ours")
    return shared_memory(rank, world)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can take the parts of two users")
@pytest.mark.parametrize("users", [[65533, 65533, 65533], [65533, 65534, 65533]])
def test_ranks_that_may_not_look_into_each_other_are_of_different_nodes(users):
    check_shared(run_ranks(3, as_users, users, backend=None), "".join(chr(user) for user in users))


def groups_within_nodes(rank: int, world: int) -> list[bool]:
    """Sub-groups find out for themselves who shares memory."""
    groups = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3], [0, 2], [1, 2, 3])]
    members = [[0, 1], [2, 3], [0, 2], [1, 2, 3]]
    kinds = []
    for group, ranks in zip(groups, members, strict=True):
        if rank in ranks:
            assert total(group, float(rank)) == sum(ranks)
            kinds.append(backend_of(group).supports_tensor_alloc(torch.device("cpu")))
    return kinds


def test_groups_share_memory_where_two_of_their_ranks_can():
    first, second, third, fourth = run_ranks(4, groups_within_nodes, nodes=2)
    assert first == [True, False]
    assert second == [True, True]
    assert third == [True, False, True]
    assert fourth == [True, True]


# --- what differs ----------------------------------------------------------------------------------------------------


def memory(rank: int, world: int) -> None:
    tensor = backend_of().allocate_tensor(100_000, dtype=torch.float32, device=torch.device("cpu"))
    assert not in_heap(tensor)
    dist.all_reduce(tensor.fill_(1))
    assert tensor[-1].item() == world


def test_tensors_of_a_group_without_a_heap_are_ordinary():
    run_ranks(2, memory, nodes=2)


def training(rank: int, world: int, options: dict[str, Any]) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(50, 400), nn.ReLU(), nn.Linear(400, 3)), **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        inputs = torch.randn(8, 50, generator=torch.Generator().manual_seed(10 * step + rank))
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True}, {"bucket_cap_mb": 0.01}])
def test_training_on_two_nodes_gives_what_it_gives_on_one(options):
    alone, apart = (run_ranks(4, training, options, nodes=count) for count in (1, 2))
    for results in (alone, apart):
        for parameters in results[1:]:
            assert all(torch.equal(a, b) for a, b in zip(results[0], parameters, strict=True))
    for one, other in zip(alone[0], apart[0], strict=True):
        torch.testing.assert_close(one, other)  # nodes add up their own ranks first


def all_reduce_large(rank: int, world: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return this rank's input, and the sum of all."""
    mine = torch.randn(300_001, generator=torch.Generator().manual_seed(rank))
    result = mine.clone()
    dist.all_reduce(result)
    return mine, result


@pytest.mark.parametrize(("dtype", "half_unit"), [("bfloat16", 2.0**-8), ("float16", 2.0**-11)])
@pytest.mark.parametrize("world", [2, 4])
def test_values_are_rounded_on_the_wire_as_the_bound_says(world, dtype, half_unit):
    results = run_ranks(world, all_reduce_large, nodes=2, env={"OURS_WIRE_DTYPE": dtype})
    inputs = torch.stack([mine for mine, _ in results]).double()
    of_nodes = inputs.view(2, world // 2, -1).sum(1)
    exact = of_nodes.sum(0)
    bound = half_unit * (of_nodes.abs().sum(0) + exact.abs() * (1 + half_unit)) + 1e-5
    for _, result in results:
        assert torch.equal(result, results[0][1])
        errors = (result.double() - exact).abs()
        assert bool((errors <= bound).all())
        assert errors.max() > half_unit / 4, "nothing was rounded"


def join_many(rank: int, world: int) -> tuple[float, int]:
    """Return the seconds that joining takes, and how many keys are in the store when all have joined."""
    # The store's server may look up the names of its clients, which takes its time where nobody answers.
    store, _, _ = next(dist.rendezvous("env://", rank, world))
    if store.add("connected", 1) == world:
        store.set("all connected", "")
    store.wait(["all connected"])
    start = time.monotonic()
    dist.init_process_group("ours", store=store, rank=rank, world_size=world)
    seconds = time.monotonic() - start
    for count in (1, 100_000):
        tensor = torch.ones(count)
        dist.all_reduce(tensor)
        assert tensor[-1].item() == world
    keys = store.num_keys()
    dist.barrier()
    return seconds, keys


@pytest.mark.parametrize("count", [1, 8])
def test_many_ranks_join_with_few_keys_each(count):
    results = run_ranks(64, join_many, backend=None, nodes=count)
    assert max(seconds for seconds, _ in results) < 20
    assert max(keys for _, keys in results) <= 8 * 64


# --- addresses -------------------------------------------------------------------------------------------------------


def listening_ports(rank: int, world: int) -> list[int]:
    """Return the ports at which this process waits for connections."""
    mine = set()
    for entry in Path("/proc/self/fd").iterdir():
        try:
            target = os.readlink(entry)
        except OSError:  # the one that was opened to list them
            continue
        if target.startswith("socket:["):
            mine.add(target[8:-1])
    ports = []
    for table in ("tcp", "tcp6"):
        path = Path("/proc/self/net") / table
        for line in path.read_text().splitlines()[1:] if path.exists() else []:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in mine:  # 0A: it listens
                ports.append(int(fields[1].rsplit(":", 1)[1], 16))
    total()
    return ports


def free_range(count: int) -> tuple[int, int]:
    """Return the ends of a range of ports of which none is in use now."""
    for first in range(21_000, 60_000, count):
        probes = [socket.socket() for _ in range(count)]
        try:
            for offset, probe in enumerate(probes):
                probe.bind(("127.0.0.1", first + offset))
            return first, first + count - 1
        except OSError:
            continue
        finally:
            for probe in probes:
                probe.close()
    raise AssertionError("no free ports")


def test_ranks_wait_at_ports_of_the_range():
    first, last = free_range(40)
    environment = {"OURS_PORT_RANGE": f"{first}-{last}", "OURS_INTERFACE": "127.0.0.1"}
    for ports in run_ranks(2, listening_ports, env=environment, nodes=2):
        assert ports
        assert all(first <= port <= last for port in ports), ports
    assert run_ranks(2, listening_ports, env=environment) == [[], []], "ranks of one node need no ports"


def connections() -> list[tuple[str, str]]:
    """Return the congestion control, and the peer's address, of each of this process's TCP connections."""
    found = []
    for entry in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(entry))) as one:
            control = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0").decode()
            found.append((control, one.getpeername()[0]))
    return found


def connected_controls(rank: int, world: int) -> set[str]:
    """Return the congestion controls of this process's TCP connections."""
    dist.all_reduce(torch.ones(100_000))
    return {control for control, _ in connections()}


def test_connections_have_the_congestion_control_of_the_option():
    path = Path("/proc/sys/net/ipv4")
    usual = (path / "tcp_congestion_control").read_text().strip()
    others = set((path / "tcp_allowed_congestion_control").read_text().split()) - {usual}
    if not others:
        pytest.skip(f"this system allows no congestion control but {usual}")
    for other in others:
        for found in run_ranks(2, connected_controls, env={"OURS_TCP_CONGESTION": other}, nodes=2):
            assert other in found
    for found in run_ranks(2, connected_controls, env={"OURS_TCP_CONGESTION": usual}, nodes=2):
        assert found == {usual}


def controls_towards(rank: int, world: int, address: str) -> set[str]:
    """Return the congestion controls of this process's connections to a host."""
    dist.all_reduce(torch.ones(100_000))
    return {control for control, peer in connections() if peer == address}


def test_near_hosts_get_on_without_bbr():
    reason = why_no_hosts()
    if reason:
        pytest.skip(reason)
    with linked_hosts(2, congestion_controls=["bbr"]) as hosts:
        if hosts[0].congestion_control != "bbr":
            pytest.skip("this system does not allow bbr")
        # Rank 0 has no connections to the other host but those of the group.
        found = run_ranks(2, controls_towards, hosts[1].address, nodes=hosts)[0]
        assert found <= {"cubic", "reno"}, found
        assert found
        asked = {"OURS_TCP_CONGESTION": "bbr"}
        assert run_ranks(2, controls_towards, hosts[1].address, nodes=hosts, env=asked)[0] == {"bbr"}


# --- hosts of their own ----------------------------------------------------------------------------------------------


def over_hosts(rank: int, world: int) -> list[float]:
    results = []
    for count in (1, 1000, 3_000_000):
        tensor = torch.full((count,), float(rank + 1))
        dist.all_reduce(tensor)
        assert tensor.eq(tensor[0]).all()
        results.append(tensor[0].item())
    incoming = torch.empty(5)
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, torch.full((5,), float(rank)), (rank + 1) % world),
            dist.P2POp(dist.irecv, incoming, (rank - 1) % world),
        ]
    )
    for work in works:
        work.wait()
    dist.barrier()
    return [*results, incoming[0].item()]


def test_two_hosts_of_two_ranks(hosts):
    results = run_ranks(4, over_hosts, nodes=hosts, pg_timeout=30)
    assert results == [[10.0, 10.0, 10.0, float((rank - 1) % 4)] for rank in range(4)]


SHAPES = [(4, 2), (5, 2), (8, 4), (8, 8)]  # ranks and nodes: 2 x 2, 3 + 2, 4 x 2, 8 x 1


@pytest.mark.parametrize("on_hosts", [False, True], ids=["played", "hosts"])
@pytest.mark.parametrize(("world", "count"), SHAPES)
def test_nodes_of_any_shape(network, world, count, on_hosts):
    nodes = network(count) if on_hosts else count
    with RankPool(world, nodes=nodes) as ranks:
        assert ranks.run(over_hosts) == [[world * (world + 1) / 2] * 3 + [float((r - 1) % world)] for r in range(world)]
        for contract in (single_calls, uneven_sizes, ring_in_a_batch, tags_in_any_order):
            ranks.run(contract)
        assert len(set(ranks.run(same_bits))) == 1


def count_bytes(rank: int, world: int, count: int) -> dict[str, int]:
    """Return how many bytes this rank's host sends for collectives of ``count`` float32 a rank."""
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
        call()  # opens the connections that it needs
        dist.barrier()
        before = bytes_sent()
        dist.barrier()
        call()
        dist.barrier()
        sent[name] = bytes_sent() - before
        dist.barrier()
    return sent


@pytest.mark.parametrize("count", [2, 3])
def test_no_byte_goes_twice_over_the_network(network, count):
    elements, local = 1_000_000, 2
    world = count * local
    results = run_ranks(world, count_bytes, elements, nodes=network(count, 1000))
    size, others = 4 * elements, count - 1
    expected = {  # of each host
        "all_reduce": [2 * others / count * size] * count,
        "reduce": [size] * others + [others / count * size],  # its root is on the last one
        "all_gather": [others * local * size] * count,
        "reduce_scatter": [others * local * size] * count,
        "all_to_all": [others * local * local * size] * count,
        "gather": [0] + [local * size] * others,
        "scatter": [others * local * size] + [0] * others,
    }
    for name, wanted in expected.items():
        sent = [results[host * local][name] for host in range(count)]
        # Who only receives confirms it.
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


def test_a_link_that_goes_down_is_noticed_within_the_timeout_on_all_ranks(hosts):
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


def test_an_example_ends_with_the_same_loss_on_two_hosts_as_on_one(hosts, tmp_path):
    losses = []
    for name, places in (("one", hosts[:1]), ("two", hosts)):
        metrics = tmp_path / name
        run_ranks(4, train_an_example, str(metrics), backend=None, nodes=places)
        losses.append([json.loads(line)["train"]["loss"] for line in metrics.read_text().splitlines()])
    assert len(losses[0]) == 2
    assert losses[0][1] < losses[0][0]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
