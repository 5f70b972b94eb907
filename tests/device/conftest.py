"""Where the tests of devices run: on which device, and what moves the data there."""

from __future__ import annotations

import pytest
from device_cases import ENVIRONMENTS


@pytest.fixture
def backend(kind: str) -> str:
    """Return the backend of the test's group."""
    return f"cpu:ours,{kind}:ours"


@pytest.fixture
def env(request: pytest.FixtureRequest, kind: str) -> dict[str, str]:
    """Return the environment of the ranks, by the name that the test is marked with."""
    env = ENVIRONMENTS[getattr(request, "param", "ipc")]
    if kind == "cuda" and any(name.startswith("STAND_IN") for name in env):
        pytest.skip("this is what the stand-in devices are told")
    return env
