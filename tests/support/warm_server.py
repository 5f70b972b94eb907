"""A Python that has loaded torch, and whose forks become the programs that tests start.

Loading torch takes seconds, which a job has to spend in each of its processes. A fork of this process begins with what
it has loaded, and is otherwise like a Python that was just started: it has the descriptors, the environment, the folder
and the arguments that were asked for, runs them as ``__main__``, and ends as any other program. Both programs.py and
warm_client.py ask for forks: a request is a length of eight bytes with the descriptors, and then JSON; the answer is
the process id and the exit code, as ``subprocess`` gives it. A byte in between is a signal for the program, and the
end of the connection kills it.

A program ends as Python does, and all that it has loaded itself is destroyed. But destroying what this process has
loaded, most of it torch's tables of operators, would write to 100 MB of memory that forks share, for a third of a
second: it is left out, unless a program asks for its ``whole_end``.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import gc
import importlib
import json
import multiprocessing
import os
import runpy
import select
import signal
import socket
import sys
import types
from dataclasses import dataclass
from typing import Any

HIGH = 400  # beyond the descriptors that a program is given
MOST = 250  # descriptors in a request


@dataclass
class Running:
    """A program, and the connection of who has asked for it."""

    pid: int
    pidfd: int
    connection: socket.socket


def receive(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Return a request, and the descriptors that came with it."""
    head, descriptors, _, _ = socket.recv_fds(connection, 8, MOST)
    length = int.from_bytes(head, "little")
    data = bytearray()
    while len(data) < length:
        if not (part := connection.recv(length - len(data))):
            raise ConnectionError("a request that was cut off")
        data += part
    return json.loads(data), descriptors


def serve(listener: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """Start programs on request. In the process of a program, return the request; None when stdin has ended."""
    running: list[Running] = []
    while True:
        poll = select.poll()
        for descriptor in [0, listener.fileno()]:
            poll.register(descriptor, select.POLLIN)
        for program in running:
            poll.register(program.pidfd, select.POLLIN)
            if program.connection.fileno() >= 0:
                poll.register(program.connection, select.POLLIN)
        ready = {descriptor for descriptor, _ in poll.poll()}
        if 0 in ready:
            for program in running:
                _signal(program, signal.SIGKILL)
            return None
        for program in [program for program in running if program.pidfd in ready]:
            _end(program)
            running.remove(program)
        for program in [program for program in running if program.connection.fileno() in ready]:
            _listen(program)
        if listener.fileno() in ready:
            connection, _ = listener.accept()
            try:
                request, descriptors = receive(connection)
            except OSError:
                connection.close()
                continue
            pid = os.fork()
            if pid == 0:
                for program in running:
                    os.close(program.pidfd)
                    program.connection.close()
                connection.close()
                listener.close()
                return request, descriptors
            for descriptor in descriptors:
                os.close(descriptor)
            running.append(Running(pid, os.pidfd_open(pid), connection))


def _end(program: Running) -> None:
    code = os.waitstatus_to_exitcode(os.waitpid(program.pid, 0)[1])
    os.close(program.pidfd)
    with contextlib.suppress(OSError):  # nobody may be there to hear it
        program.connection.sendall(json.dumps([program.pid, code]).encode())
    program.connection.close()


def _listen(program: Running) -> None:
    try:
        numbers = program.connection.recv(100)
    except OSError:
        numbers = b""
    for number in numbers:
        _signal(program, number)
    if not numbers:
        _signal(program, signal.SIGKILL)
        program.connection.close()


def _signal(program: Running, number: int) -> None:
    """Send a signal. SIGKILL also ends what the program has started."""
    with contextlib.suppress(ProcessLookupError):
        if number == signal.SIGKILL:
            os.killpg(program.pid, number)
        os.kill(program.pid, number)


def end_before_what_is_loaded() -> None:
    """Let exit() end the process when it has called what is registered from here on, which it calls first."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "on_exit"):
        libc.on_exit(libc._exit, None)  # which is called with the exit code
        libc.__cxa_atexit(libc.fflush, None, None)  # before that; of all files


def become(request: dict[str, Any], descriptors: list[int]) -> None:
    """Run what was asked for as ``__main__``."""
    if not request.get("whole_end"):
        end_before_what_is_loaded()
    os.setsid()
    moved = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, HIGH) for descriptor in descriptors]
    os.closerange(3, HIGH)
    for descriptor, number in zip(moved, request["descriptors"], strict=True):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    sys.executable = request["executable"]
    multiprocessing.set_executable(sys.executable)
    sys.argv[:] = request["argv"]
    sys.path[:0] = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    way, what = request["program"]
    if way == "module":
        sys.path.insert(0, os.getcwd())
        runpy.run_module(what, run_name="__main__", alter_sys=True)
        return
    main = types.ModuleType("__main__")
    main.__builtins__ = __builtins__  # type: ignore[attr-defined]
    sys.modules["__main__"] = main
    if way == "file":
        sys.path.insert(0, os.path.dirname(os.path.realpath(what)))
        main.__file__ = what
        with open(what, "rb") as file:
            exec(compile(file.read(), what, "exec"), main.__dict__)
    else:
        sys.path.insert(0, "")
        exec(compile(what, "<string>", "exec"), main.__dict__)


def load() -> None:
    """Load what torch loads with the first optimizer or mesh, and what torchrun and the examples use."""
    sys.modules["triton"] = None  # type: ignore[assignment]  # it is for GPUs, and would print complaints about gc.freeze()
    for name in ("torch._dynamo", "torch.distributed.launcher.api", "torch.distributed.tensor", "sklearn.datasets"):
        importlib.import_module(name)
    del sys.modules["triton"]
    gc.freeze()  # so that programs end without looking at all of it, which takes a second


if __name__ == "__main__":
    load()
    del sys.path[0]  # this file's folder
    if wanted := serve(socket.socket(fileno=int(sys.argv[1]))):
        become(*wanted)
