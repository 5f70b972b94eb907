"""Ways into a group: environment, URLs and stores; and ranks that do not come, or cannot be reached."""

from __future__ import annotations

import datetime
import os
import socket
import time

import pytest
import torch.distributed as dist
from probes import refused_to_join, total
from ranks import run_ranks

# --- ways in ---------------------------------------------------------------------------------------------------------


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def init_from_environment(rank: int, world: int, port: int) -> float:
    os.environ.update({"MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "False"})
    dist.init_process_group("cpu:ours")
    return total()


@pytest.mark.parametrize("world", [1, 3])
def test_environment(world):
    assert run_ranks(world, init_from_environment, free_port(), backend=None) == [world] * world


def init_from_urls(rank: int, world: int, urls: list[str]) -> list[float]:
    """One group after another, each from a URL of its own."""
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"
    sums = []
    for url in urls:
        url = url.replace("MASTER_ADDR", os.environ["MASTER_ADDR"])
        dist.init_process_group("ours", init_method=url, rank=rank, world_size=world)
        sums.append(total())
        dist.destroy_process_group()
    return sums


@pytest.mark.parametrize("world", [1, 3])
def test_urls(world, tmp_path, nodes):
    urls = [f"file://{tmp_path}/store", f"tcp://MASTER_ADDR:{free_port()}", f"file://{tmp_path}/another"]
    assert run_ranks(world, init_from_urls, urls, backend=None, nodes=nodes) == [[world] * 3] * world


def init_from_one_store(rank: int, world: int, path: str) -> list[float]:
    """The same store for several groups, one after another; a file where there is a path."""
    results = []
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    server = None if path else dist.TCPStore(*address, world, is_master=False)
    for round_number in range(4):
        store = server or dist.FileStore(path, world)
        dist.init_process_group("ours", store=store, rank=rank, world_size=world)
        results.append(total(value=float(round_number)))
        dist.barrier()
        dist.destroy_process_group()
    return results


@pytest.mark.parametrize("kind", ["server", "file"])
def test_one_store_serves_one_group_after_another(tmp_path, kind, nodes):
    path = str(tmp_path / "store") if kind == "file" else ""
    assert run_ranks(3, init_from_one_store, path, backend=None, nodes=nodes) == [[0, 3, 6, 9]] * 3


# --- who does not come -----------------------------------------------------------------------------------------------


def alone(rank: int, world: int) -> tuple[str, float]:
    if rank == world - 1:
        return "", 0.0
    start = time.monotonic()
    with pytest.raises(dist.DistBackendError) as error:
        dist.init_process_group("ours", timeout=datetime.timedelta(seconds=2))
    return str(error.value), time.monotonic() - start


def test_a_rank_that_does_not_come_is_named_at_the_timeout():
    for text, seconds in run_ranks(3, alone, backend=None)[:2]:
        assert "rank 2" in text
        assert "2000 ms" in text
        assert 1.9 < seconds < 4


def leaderless(rank: int, world: int) -> str:
    if rank == 0:
        return ""
    with pytest.raises(dist.DistBackendError) as error:
        dist.init_process_group("ours", timeout=datetime.timedelta(seconds=1))
    return str(error.value)


def test_an_absent_leader_is_named_at_the_timeout():
    for text in run_ranks(3, leaderless, backend=None)[1:]:
        assert "rank 0" in text
        assert "did not publish" in text


@pytest.mark.parametrize(
    ("rank", "variable"), [(0, "OURS_INTERFACE"), (1, "OURS_INTERFACE"), (1, "OURS_TCP_CONGESTION")]
)
def test_a_rank_that_other_nodes_cannot_reach_is_named_by_all(rank, variable):
    environments = [{variable: "nosuch0"} if each == rank else {} for each in range(3)]
    results = run_ranks(3, refused_to_join, backend=None, env=environments, nodes=2)
    assert len({text for text, _ in results}) == 1, "the ranks tell different stories"
    text = results[0][0]
    assert f"rank {rank} (host" in text
    assert "nosuch0" in text
    assert max(seconds for _, seconds in results) < 10
