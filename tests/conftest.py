"""Fixtures that several test files share."""

from __future__ import annotations

import contextlib
import functools
import signal
from collections.abc import Callable, Iterator
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import device_type
import example_programs
import pytest
import torch
from hosts import Host, linked_hosts, why_no_hosts
from programs import warm_folder
from ranks import Nodes, RankPool, fork_server

from ourddp import spawned

MOST_RANKS = 24  # of pools; each takes up to 150 MB


def pytest_configure() -> None:
    """Let programs that tests start receive Ctrl-C, even if a shell has started the tests in the background."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_sessionstart(session: pytest.Session) -> None:
    """Let the processes that ranks and programs are forks of load torch while the tests of a folder are collected."""
    config = session.config
    if any(Path(argument).is_dir() for argument in config.args) and not config.option.collectonly:
        fork_server()
        forkserver.ensure_running()
        warm_folder()


@pytest.fixture(scope="session")
def rank_pool() -> Iterator[Callable[..., RankPool]]:
    """Return a function that gives the pool ``rank_pool(world, backend="ours", **keywords)``, the same for many tests.

    The pools that have not been asked for the longest are closed when there are too many processes for small machines.
    """
    pools: dict[str, RankPool] = {}  # the last one that was asked for is at the end

    def get(world: int, backend: str | None = "ours", **keywords: Any) -> RankPool:
        if keywords.get("nodes") == 1:
            del keywords["nodes"]
        key = repr((world, backend, sorted(keywords.items())))
        pools[key] = pools.pop(key, None) or RankPool(world, backend, **keywords)
        while len(pools) > 1 and sum(pool.world for pool in pools.values()) > MOST_RANKS:
            pools.pop(next(iter(pools))).close()
        return pools[key]

    yield get
    for pool in pools.values():
        pool.close()


@pytest.fixture(scope="session")
def run_example(rank_pool: Callable[..., RankPool]) -> example_programs.Run:
    """Return a function ``run_example(name, ranks, *flags)``, which runs an example and returns what rank 0 prints."""
    return example_programs.runner(rank_pool)


@pytest.fixture
def quick_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the ranks that the package spawns come from the fork server that has loaded torch."""
    start = functools.partial(spawned.start_processes, start_method=fork_server().get_start_method())
    monkeypatch.setattr(spawned, "start_processes", start)


@pytest.fixture(scope="session")
def network() -> Iterator[Callable[..., list[Host]]]:
    """Return a function ``network(count, mbit=0)`` that makes linked hosts, once for the session.

    It skips the test if this process may not make any.
    """
    reason = why_no_hosts()
    made: dict[tuple[int, int], list[Host]] = {}
    with contextlib.ExitStack() as stack:

        def get(count: int, mbit: int = 0) -> list[Host]:
            if reason:
                pytest.skip(reason)
            if (count, mbit) not in made:
                made[count, mbit] = stack.enter_context(linked_hosts(count, mbit))
            return made[count, mbit]

        yield get


@pytest.fixture(scope="session", params=["one node", "two nodes", "two hosts"])
def nodes(request: pytest.FixtureRequest, network: Callable[..., list[Host]]) -> Nodes:
    """Where the ranks of a test live: on one node, on two nodes that share no memory, or on two hosts with networks.

    What the ranks do must not depend on it.
    """
    return {"one node": 1, "two nodes": 2}.get(request.param) or network(2)


@pytest.fixture(scope="session", params=[1, 2], ids=["one node", "two nodes"])
def played_nodes(request: pytest.FixtureRequest) -> int:
    """Return how many nodes the ranks of a test play, for tests that start programs of their own."""
    return request.param


@pytest.fixture(scope="session")
def standin() -> str:
    """Return the name of the tests' own device type, which works anywhere once it is compiled."""
    tool = device_type.missing_tool()
    if tool is not None:
        pytest.skip(f"the stand-in devices cannot be compiled without {tool}")
    device_type.build()
    return device_type.NAME


@pytest.fixture(scope="session", params=[device_type.NAME, pytest.param("cuda", marks=pytest.mark.gpu)])
def kind(request: pytest.FixtureRequest) -> str:
    """Return a device type: the stand-in, and CUDA if this machine has it."""
    if request.param == device_type.NAME:
        return request.getfixturevalue("standin")
    if not torch.cuda.is_available():
        pytest.skip("torch finds no CUDA device here")
    return request.param


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    """Return where the tensors of a test are: on the CPU, and on CUDA's device if this machine has one."""
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("torch finds no CUDA device here")
    return request.param


@pytest.fixture
def hosts() -> Iterator[list[Host]]:
    """Make two linked hosts for this test alone; skip it if this process may not make any."""
    reason = why_no_hosts()
    if reason:
        pytest.skip(reason)
    with linked_hosts(2) as made:
        yield made


@pytest.fixture(params=["gloo", "ours"])
def backend(request: pytest.FixtureRequest) -> str:
    """Return the backend of the test's group: Gloo, whose results are known to be right, and then ``ours``."""
    return request.param
