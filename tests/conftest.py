"""Fixtures that several test files share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hosts import Host, linked_hosts, why_no_hosts
from ranks import RankPool


@pytest.fixture(scope="session")
def rank_pool() -> Iterator[Callable[..., RankPool]]:
    """``rank_pool(world, backend="ours", **keywords)``: the pool of that kind, made once and ended with the session."""
    pools: dict[str, RankPool] = {}

    def get(world: int, backend: str | None = "ours", **keywords: Any) -> RankPool:
        key = repr((world, backend, sorted(keywords.items())))
        if key not in pools:
            pools[key] = RankPool(world, backend, **keywords)
        return pools[key]

    yield get
    for pool in pools.values():
        pool.close()


@pytest.fixture(scope="session", params=[1, 2], ids=["one node", "two nodes"])
def nodes(request: pytest.FixtureRequest) -> int:
    """Count the nodes that the ranks of a test play: with two, half of them share no memory with the others."""
    return request.param


@pytest.fixture
def hosts() -> Iterator[list[Host]]:
    """Two hosts with a link between them; skipped where this process may not make any."""
    reason = why_no_hosts()
    if reason:
        pytest.skip(reason)
    with linked_hosts(2) as made:
        yield made


@pytest.fixture(params=["gloo", "ours"])
def backend(request: pytest.FixtureRequest) -> str:
    """Name the backend of the test's group: Gloo, whose results are known to be right, and then ``ours``."""
    return request.param
