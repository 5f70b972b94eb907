"""Starts programs with the mpirun of the MPI that the extension was built for, or that is found on the path."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import programs

TIMEOUT = 120
GRACE = 10
SEGMENTS = ("sm_segment.*", "mpich_shm_*")  # Open MPI's and MPICH's


def find(tool: str) -> str | None:
    """Return the path of a program of MPI's: beside this Python, or on the path."""
    beside = Path(sys.executable).with_name(tool)
    return str(beside) if beside.exists() else shutil.which(tool)


def environment(**variables: str) -> dict[str, str]:
    """Return an environment without a launcher's variables, and with ``variables``, for mpirun by any user."""
    as_root = {f"{name}_ALLOW_RUN_AS_ROOT{end}": "1" for name in ("OMPI", "PRTE") for end in ("", "_CONFIRM")}
    # Open MPI's layer over libfabric sleeps for a second in each process that finds no fabric. Ranks of one machine
    # need none.
    no_fabric = {"OMPI_MCA_btl": "^ofi"}
    return programs.environment(**as_root, **no_fabric, **variables)


def is_open_mpi(mpirun: str) -> bool:
    """Return whether ``mpirun`` is Open MPI's."""
    said = subprocess.run([mpirun, "--version"], capture_output=True, text=True, timeout=TIMEOUT, check=False).stdout
    return "Open MPI" in said


def shared_memory() -> set[Path]:
    """Return MPI's segments that no process uses: those of jobs that did not finalise MPI."""
    found = {path for name in SEGMENTS for path in Path("/dev/shm").glob(name)}
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):  # the process has ended, or belongs to another user
            text = maps.read_text()
            found = {path for path in found if str(path) not in text}
    return found


def run(processes: int, command: list[str], env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Run ``command`` in ``processes`` processes of one MPI job, however many cores there are."""
    mpirun = find("mpirun")
    assert mpirun is not None
    options = ["--oversubscribe", "--bind-to", "none"] if is_open_mpi(mpirun) else []
    line = [mpirun, *options, "-n", str(processes), *command]
    job = subprocess.Popen(
        line, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        stdout, stderr = job.communicate(timeout=TIMEOUT)
    except subprocess.TimeoutExpired:
        # SIGTERM makes mpirun end its processes. It may be a script around the real one, hence the whole group.
        os.killpg(job.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            job.communicate(timeout=GRACE)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(job.pid, signal.SIGKILL)
        stdout, stderr = job.communicate()
        raise AssertionError(f"mpirun did not end within {TIMEOUT} s\n{stdout}{stderr}") from None
    return subprocess.CompletedProcess(line, job.returncode, stdout, stderr)
