"""Ranks that make different calls get an error at once, and other groups go on."""

from __future__ import annotations

import pytest
from mismatch_cases import CASES, check, mismatch
from patience import check_soon


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("kind", CASES)
def test_all_ranks_find_a_mismatch_at_once(rank_pool, world, kind, nodes):
    def attempt() -> float:
        results = rank_pool(world, nodes=nodes).run(mismatch, kind, world - 1)
        return check(kind, world - 1, nodes == 1, results)

    check_soon(1, attempt)
