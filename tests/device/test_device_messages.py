"""Sends and receives of device tensors."""

from __future__ import annotations

import device_trouble
import pytest

CASES = [
    (device_trouble.messages_around_a_ring, 3),
    (device_trouble.messages_from_anyone, 3),
    (device_trouble.nobody_waits_for_a_receive, 2),
    (device_trouble.no_message_holds_up_another, 2),
    (device_trouble.a_group_ends_after_its_messages, 2),
]


@pytest.mark.parametrize(("case", "world"), CASES, ids=lambda value: getattr(value, "__name__", str(value)))
def test_messages(rank_pool, kind, case, world, played_nodes):
    rank_pool(world, f"cpu:ours,{kind}:ours", nodes=played_nodes).run(case, kind)
