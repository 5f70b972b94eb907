"""Collectives of device tensors: the same bits as on the CPU, whatever moves them."""

from __future__ import annotations

import device_cases
import pytest

# Which ranks share a device, and what moves the data then; the stand-in devices believe what they are told.
SETTINGS = {
    "a device each": {},
    "one device": {"STAND_IN_IDENTITIES": "0"},
    "two devices": {"STAND_IN_IDENTITIES": "0,1"},
    "staging": {"OURS_DEVICE_ENGINE": "staging"},
    "NCCL": {"STAND_IN_NCCL": "1"},
    "NCCL, compared before": {"STAND_IN_NCCL": "1", "OURS_CHECK": "before"},
}


def spec(kind: str) -> str:
    return f"cpu:ours,{kind}:ours"


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_results_are_the_cpus(rank_pool, kind, world, setting):
    if world == 4 and kind != "cuda":
        pytest.skip("four ranks show no more than three do on devices that are threads")
    rank_pool(world, spec(kind), env=SETTINGS[setting]).run(device_cases.same_as_on_the_cpu, kind, timeout=120)
