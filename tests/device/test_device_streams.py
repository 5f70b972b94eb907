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


NCCL = {"STAND_IN_NCCL": "1"}


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_streams(rank_pool, kind, world, case):
    rank_pool(world, f"cpu:ours,{kind}:ours").run(case, kind)


ENQUEUED = [device_streams.waiting_blocks_streams_not_hosts, device_streams.a_capture_takes_collectives]


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("case", [*CASES, *ENQUEUED], ids=lambda case: case.__name__)
def test_streams_with_nccl(rank_pool, standin, world, case):
    if world == 1 and case in CASES:
        pytest.skip("a single rank needs no NCCL")
    rank_pool(world, f"cpu:ours,{standin}:ours", env=NCCL).run(case, standin)


@pytest.mark.parametrize("option", ["OURS_BLOCKING_WAIT=1", "OURS_CHECK=before"])
def test_nccl_lets_the_host_wait_where_an_option_says_so(rank_pool, standin, option):
    name, value = option.split("=")
    pool = rank_pool(2, f"cpu:ours,{standin}:ours", env={**NCCL, name: value})
    pool.run(device_streams.wait_blocks_the_host, standin)
    pool.run(device_streams.futures_and_callbacks, standin)
