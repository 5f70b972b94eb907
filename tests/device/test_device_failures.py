"""What goes wrong while a device works: every rank hears of it, and no stream stays blocked."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import device_trouble
import pytest
from patience import with_growing_timeouts
from ranks import run_ranks

ROOT = Path(__file__).resolve().parents[2]
SUPPORT = ROOT / "tests" / "support"


def spec(kind: str) -> str:
    return f"cpu:ours,{kind}:ours"


MISMATCHES = [
    device_trouble.different_calls,
    device_trouble.calls_of_the_cpu_and_a_device,
    device_trouble.what_a_failure_keeps_goes_with_its_group,
]


NCCL = {"STAND_IN_NCCL": "1"}


@pytest.mark.parametrize("env", [{}, NCCL], ids=["ipc", "nccl"])
@pytest.mark.parametrize("case", MISMATCHES)
def test_mismatches(kind, case, env):
    run_ranks(2, case, kind, backend=spec(kind), env=env)


def test_an_error_that_no_call_tells(standin):
    run_ranks(2, device_trouble.an_error_that_no_call_tells, standin, backend=spec(standin), env=NCCL)


@pytest.mark.parametrize("case", [device_trouble.nobody_comes, device_trouble.the_work_before_takes_too_long])
def test_timeouts(kind, case):
    with_growing_timeouts(lambda timeout: run_ranks(2, case, kind, backend=spec(kind), pg_timeout=timeout))


def test_a_late_peer_of_nccl(standin):
    case = device_trouble.nobody_comes
    with_growing_timeouts(
        lambda timeout: run_ranks(2, case, standin, backend=spec(standin), pg_timeout=timeout, env=NCCL)
    )


@pytest.mark.parametrize("env", [NCCL, {}, {"OURS_DEVICE_ENGINE": "staging"}], ids=["nccl", "ipc", "staging"])
def test_a_killed_peer(kind, env):
    run_ranks(3, device_trouble.a_peer_dies, kind, backend=spec(kind), killed=[2], env=env)


@pytest.mark.parametrize("env", [{}, NCCL], ids=["ipc", "nccl"])
@pytest.mark.parametrize("world", [1, 2])
def test_abort_of_what_waits_for_a_stuck_stream(standin, world, env):
    run_ranks(world, device_trouble.a_stream_is_stuck, standin, backend=spec(standin), env=env)


@pytest.mark.parametrize("end", ["", "dist.destroy_process_group()"])
def test_a_program_may_end_with_collectives_under_way(kind, end, tmp_path):
    code = f"""
        import sys
        sys.path.insert(0, {str(SUPPORT)!r})
        import device_cases, device_type, torch, torch.distributed as dist
        if {kind!r} == device_type.NAME:
            device_type.load()
        store = dist.FileStore({str(tmp_path / "store")!r}, 1)
        dist.init_process_group({spec(kind)!r}, rank=0, world_size=1, store=store)
        x = torch.ones(3, device={kind!r})
        dist.all_reduce(x)
        stop = device_cases.stop_stream({kind!r})
        work = dist.all_reduce(x, async_op=True)
        work.wait()
        if {bool(end)}:
            dist.group.WORLD._get_backend(torch.device({kind!r})).abort()
        {end}
        stop.go_on()
        print("ended")
    """
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", textwrap.dedent(code)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=180)
    assert (result.returncode, result.stdout) == (0, "ended\n"), result.stderr
