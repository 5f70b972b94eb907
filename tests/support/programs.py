"""Runs programs to their end, each in a process of its own that has loaded torch already (warm_server.py).

So have the processes that such a program starts by ``sys.executable``.
``started()`` is for programs that a test disturbs, or that must be as fresh as a user's.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import selectors
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SUPPORT = Path(__file__).resolve().parent
TIMEOUT_S = 110
# The beginnings of the variables that launchers set for the processes that they start.
LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "OMPI_", "PMI", "PRTE_", "SLURM_", "MPI_", "TORCHELASTIC_")


def environment(**variables: str) -> dict[str, str]:
    """Return this process's environment without a launcher's variables, and with ``variables``."""
    return {**{name: value for name, value in os.environ.items() if not name.startswith(LAUNCHERS)}, **variables}


def path_with_python() -> str:
    """Return PATH with the folder of this Python first, in which pip puts programs such as mpirun."""
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])


@functools.cache
def warm_folder() -> Path:
    """Return a folder with ``python``, ``torchrun`` and ``ourddp``, whose processes have loaded torch already.

    They are for programs that start others: put the folder first in PATH, or use ``warm_python()`` for
    ``sys.executable``. The package is not loaded.
    """
    folder = tempfile.TemporaryDirectory(prefix="warm-")
    path = Path(folder.name)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path / "socket"))
    listener.listen(128)
    # stdin ends with this process, and with that the server.
    server = subprocess.Popen(
        [sys.executable, str(SUPPORT / "warm_server.py"), str(listener.fileno())],
        stdin=subprocess.PIPE,
        env=environment(OMP_NUM_THREADS="1"),
        cwd="/",
        pass_fds=[listener.fileno()],
        start_new_session=True,
    )
    listener.close()
    client = shlex.join([sys.executable, "-IS", str(SUPPORT / "warm_client.py"), str(path / "socket")])
    commands = {
        "python": f'exec {client} "$0" "$@"',
        "torchrun": 'exec "${0%/*}/python" -m torch.distributed.run "$@"',
        "ourddp": 'exec "${0%/*}/python" -m ourddp "$@"',
    }
    for name, command in commands.items():
        (path / name).write_text(f"#!/bin/sh\n{command}\n")
        (path / name).chmod(0o755)

    def stop() -> None:
        server.communicate()
        folder.cleanup()

    atexit.register(stop)
    return path


def warm_python() -> str:
    """Return a command that starts as Python does, but with torch loaded already."""
    return str(warm_folder() / "python")


@dataclass
class Program:
    """What to run, and what differs from this process: its arguments, its folder and its environment."""

    way: str  #: "code", "file" or "module"
    what: str
    argv: list[str]
    env: dict[str, str]
    cwd: Path = ROOT
    whole_end: bool = False  #: whether torch's own libraries are destroyed at the end, too (see warm_server.py)


def run_all(programs: Sequence[Program]) -> list[subprocess.CompletedProcess[str]]:
    """Run programs at the same time. What they have started is killed when all have ended."""
    answers: dict[int, tuple[int, int]] = {}
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        selector = stack.enter_context(selectors.DefaultSelector())
        for number, program in enumerate(programs):
            connection = stack.enter_context(socket.socket(socket.AF_UNIX))
            connection.connect(str(warm_folder() / "socket"))
            files = [stack.enter_context(open(f"{folder}/{number}-{name}", "w+b")) for name in ("out", "err")]
            about = {"program": [program.way, program.what], "argv": program.argv, "executable": warm_python()}
            around = {"env": program.env, "cwd": str(program.cwd), "descriptors": [0, 1, 2]}
            around["whole_end"] = program.whole_end
            data = json.dumps(about | around).encode()
            nothing = stack.enter_context(open(os.devnull, "rb"))
            given = [file.fileno() for file in [nothing, *files]]
            socket.send_fds(connection, [len(data).to_bytes(8, "little")], given)
            connection.sendall(data)
            selector.register(connection, selectors.EVENT_READ, number)
        deadline = time.monotonic() + TIMEOUT_S
        while len(answers) < len(programs) and time.monotonic() < deadline:
            for key, _ in selector.select(deadline - time.monotonic()):
                answers[key.data] = json.loads(key.fileobj.recv(100))  # type: ignore[union-attr]
                selector.unregister(key.fileobj)
        # The end of the connections kills those that have not ended.
        for pid, _ in answers.values():
            with suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
        texts = [
            [Path(folder, f"{number}-{name}").read_text() for name in ("out", "err")] for number in range(len(programs))
        ]
    late = sorted(set(range(len(programs))) - set(answers))
    assert not late, f"programs {late} did not end in {TIMEOUT_S} s: {texts}"
    return [
        subprocess.CompletedProcess(program.argv, answers[number][1], *texts[number])
        for number, program in enumerate(programs)
    ]


def run_programs(
    code: str,
    each: list[dict[str, str]],
    cwd: Path = ROOT,
    argv: list[str] | None = None,
    *,
    whole_end: bool = False,
) -> list[subprocess.CompletedProcess[str]]:
    """Run ``code`` once for each of ``each``, what is added to the environment, all at the same time.

    ``whole_end`` is for tests of how programs end.
    """
    around, code = environment(PYTHONPATH=str(ROOT)), textwrap.dedent(code)
    return run_all([Program("code", code, argv or ["program"], around | env, cwd, whole_end) for env in each])


def run_python(code: str, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """Run ``code`` with ``env`` added to the environment."""
    return run_programs(code, [env], cwd)[0]


def run_file(path: Path, *arguments: str, each: list[dict[str, str]] | None = None) -> list[tuple[int, str]]:
    """Run a file as Python does. Return exit codes and what was printed."""
    around = environment(PYTHONPATH=str(ROOT))
    done = run_all([Program("file", str(path), [str(path), *arguments], around | env) for env in each or [{}]])
    return [(one.returncode, one.stdout + one.stderr) for one in done]


def run_module(name: str, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run ``python -m name arguments``."""
    around = environment(PYTHONPATH=str(ROOT))
    return run_all([Program("module", name, [name, *arguments], around | env)])[0]


@contextmanager
def started(
    commands: Sequence[Sequence[str]], each: Sequence[dict[str, str]], stderr: int | None = subprocess.PIPE
) -> Iterator[list[subprocess.Popen[str]]]:
    """Start commands at the same time, each with what is added to its environment. At the end, kill all of them.

    Each is the first process of a group of its own, which is killed with it.
    """
    around = environment(PYTHONPATH=str(ROOT))
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": stderr, "text": True, "start_new_session": True}
    with ExitStack() as stack:
        programs = [
            stack.enter_context(subprocess.Popen(command, env=around | env, **pipes))
            for command, env in zip(commands, each, strict=True)
        ]
        try:
            yield programs
        finally:
            for program in programs:
                with suppress(ProcessLookupError):
                    os.killpg(program.pid, signal.SIGKILL)


def free_port() -> int:
    """Return a port of this machine that nobody uses now."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


def job(world: int, store: Any) -> list[dict[str, str]]:
    """Return what each rank of a job of this machine needs in its environment; ``store`` is a TCPStore's server."""
    common = {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1"}
    common |= {"MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True", "OMP_NUM_THREADS": "1"}
    return [{**common, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(world)]
