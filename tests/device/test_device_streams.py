"""Collectives of device tensors among the work of streams: who waits for whom, and who keeps what."""

from __future__ import annotations

import device_streams
import pytest
from ranks import run_ranks

CASES = [
    device_streams.waiting_holds_streams_not_hosts,
    device_streams.side_streams,
    device_streams.tensors_may_go_at_once,
    device_streams.freeing_a_tensor_holds_up_no_collective,
    device_streams.blocking_waits,
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


def test_blocking_wait_by_an_option(rank_pool, kind):
    pool = rank_pool(2, f"cpu:ours,{kind}:ours", env={"OURS_BLOCKING_WAIT": "1"})
    pool.run(device_streams.blocking_waits, kind)
    pool.run(device_streams.futures_and_callbacks, kind)


@pytest.mark.parametrize("queues", [1, 3])
def test_streams_that_share_queues_are_not_held(kind, queues):
    env = {"CUDA_DEVICE_MAX_CONNECTIONS": str(queues)}
    run_ranks(2, device_streams.streams_that_share_queues, kind, backend=f"cpu:ours,{kind}:ours", env=env)
