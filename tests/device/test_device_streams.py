"""Collectives of device tensors among the work of streams: who waits for whom, and who keeps what."""

from __future__ import annotations

import device_streams
import pytest

CASES = [
    device_streams.side_streams,
    device_streams.tensors_may_go_at_once,
    device_streams.the_host_waits,
    device_streams.futures_and_callbacks,
    device_streams.callbacks_of_gathers,
    device_streams.futures_of_several,
    device_streams.barriers_wait_for_the_device,
    device_streams.misuse,
]


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_streams(rank_pool, kind, world, case):
    rank_pool(world, f"cpu:ours,{kind}:ours").run(case, kind)
