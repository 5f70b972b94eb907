"""Runs programs to their end, each in a process of its own.

Loading torch takes seconds. So the processes are forks of one that has loaded it, and otherwise begin and end as any
Python program does; the package is not loaded. What a program has started is killed when it has ended.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 110
# The beginnings of the variables that launchers set for the processes that they start.
LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "OMPI_", "PMI", "PRTE_", "SLURM_", "MPI_", "TORCHELASTIC_")


def environment(**variables: str) -> dict[str, str]:
    """Return this process's environment without a launcher's variables, and with ``variables``."""
    return {**{name: value for name, value in os.environ.items() if not name.startswith(LAUNCHERS)}, **variables}


@functools.cache
def _starter() -> subprocess.Popen[str]:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    around = environment(OMP_NUM_THREADS="1", PYTHONPATH=str(ROOT))
    return subprocess.Popen([sys.executable, __file__], env=around, cwd="/", text=True, **pipes)


def run_programs(
    code: str, each: list[dict[str, str]], cwd: Path = ROOT, argv: list[str] | None = None
) -> list[subprocess.CompletedProcess[str]]:
    """Run ``code`` once for each of ``each``, what is added to the environment, all at the same time."""
    with tempfile.TemporaryDirectory() as folder:
        programs = [
            {
                "code": textwrap.dedent(code),
                "env": environment(PYTHONPATH=str(ROOT)) | env,
                "cwd": str(cwd),
                "argv": argv or ["program"],
                "files": [f"{folder}/{number}-out", f"{folder}/{number}-err"],
            }
            for number, env in enumerate(each)
        ]
        codes = _ask(json.dumps(programs))
        texts = [[Path(file).read_text() for file in program["files"]] for program in programs]
    assert None not in codes, f"some programs did not end in {TIMEOUT_S} s: {codes} {texts}"
    return [subprocess.CompletedProcess(["program"], code, *text) for code, text in zip(codes, texts, strict=True)]


def _ask(request: str) -> list[int | None]:
    """Have programs run. Return their exit codes."""
    starter = _starter()
    assert starter.stdin is not None
    assert starter.stdout is not None
    try:
        print(request, file=starter.stdin, flush=True)
        return json.loads(starter.stdout.readline())
    except BaseException:  # such as the test's timeout: the answer would be taken for that to the next request
        starter.kill()
        _starter.cache_clear()
        raise


def run_python(code: str, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """Run ``code`` with ``env`` added to the environment."""
    return run_programs(code, [env], cwd)[0]


def run_file(path: Path, *arguments: str, each: list[dict[str, str]] | None = None) -> list[tuple[int, str]]:
    """Run a file as Python does. Return exit codes and what was printed."""
    code = "import runpy, sys; sys.path.insert(0, sys.argv.pop(0)); runpy.run_path(sys.argv[0], run_name='__main__')"
    done = run_programs(code, each or [{}], argv=[str(path.parent), str(path), *arguments])
    return [(one.returncode, one.stdout + one.stderr) for one in done]


def run_module(name: str, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run ``python -m name arguments``."""
    code = "import runpy, sys; runpy.run_module(sys.argv[0], run_name='__main__', alter_sys=True)"
    return run_programs(code, [env], argv=[name, *arguments])[0]


def job(world: int, store: Any) -> list[dict[str, str]]:
    """Return what each rank of a job of this machine needs in its environment; ``store`` is a TCPStore's server."""
    common = {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1"}
    common |= {"MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True", "OMP_NUM_THREADS": "1"}
    return [{**common, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(world)]


# --- the process that starts the others ------------------------------------------------------------------------------


def _end_of(pids: list[int]) -> list[int | None]:
    """Wait for the processes. Return their exit codes; None for those that had to be killed."""
    codes: dict[int, int | None] = dict.fromkeys(pids)
    deadline = time.monotonic() + TIMEOUT_S
    while None in codes.values() and time.monotonic() < deadline:
        for pid in [pid for pid, code in codes.items() if code is None]:
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                codes[pid] = os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    for pid, code in codes.items():
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        if code is None:
            os.waitpid(pid, 0)
    return list(codes.values())


def _serve() -> dict[str, Any] | None:
    """Start programs on request. In the process of a program, return what it is; otherwise None, when all is over."""
    while line := sys.stdin.readline():
        pids = []
        for program in json.loads(line):
            pid = os.fork()
            if pid == 0:
                return program
            pids.append(pid)
        print(json.dumps(_end_of(pids)), flush=True)
    return None


def _become(program: dict[str, Any]) -> None:
    os.setsid()
    for descriptor, file in enumerate([os.devnull, *program["files"]]):
        opened = os.open(file, os.O_RDWR | os.O_CREAT)
        os.dup2(opened, descriptor)
        os.close(opened)
    os.environ.clear()
    os.environ.update(program["env"])
    os.chdir(program["cwd"])
    sys.argv[:] = program["argv"]
    exec(compile(program["code"], "<program>", "exec"), {"__name__": "__main__"})


if __name__ == "__main__":
    import torch.distributed  # noqa: F401

    sys.path.remove(str(Path(__file__).parent))
    if wanted := _serve():
        _become(wanted)
