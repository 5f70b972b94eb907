"""Fixtures that several test files share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
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


@pytest.fixture(params=["gloo", "ours"])
def backend(request: pytest.FixtureRequest) -> str:
    """Name the backend of the test's group: Gloo, whose results are known to be right, and then ``ours``."""
    return request.param
