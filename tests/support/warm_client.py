"""Looks like Python to those who start it, but asks warm_server.py for a fork that runs the program.

``warm_client.py SOCKET EXECUTABLE ARGUMENTS...``: ``EXECUTABLE`` is the script that started this one, and becomes the
program's ``sys.executable``. A Python with flags that a fork cannot have is started as it is.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import socket
import sys
from typing import NoReturn

FLAGS = {"-u", "-B", "-s", "-E"}  # those without a consequence here
FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)


def parse(arguments: list[str]) -> dict[str, object] | None:
    """Return the program and its arguments; None for what a fork cannot do."""
    rest = list(arguments)
    while rest and rest[0] in FLAGS:
        rest.pop(0)
    if len(rest) > 1 and rest[0] == "-c":
        return {"program": ["code", rest[1]], "argv": ["-c", *rest[2:]]}
    if len(rest) > 1 and rest[0] == "-m":
        return {"program": ["module", rest[1]], "argv": rest[1:]}
    if rest and not rest[0].startswith("-"):
        return {"program": ["file", rest[0]], "argv": rest}
    return None


def open_descriptors() -> list[int]:
    """Return those that the program would inherit."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the folder's own
            if os.get_inheritable(int(name)):
                found.append(int(name))
    return sorted(found)


def end_as(code: int) -> NoReturn:
    """End as the program did."""
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if -code in FORWARDED:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def main() -> NoReturn:
    path, executable, *arguments = sys.argv[1:]
    program = parse(arguments)
    if program is None or "PYTHONWARNINGS" in os.environ:
        os.execv(sys.executable, [sys.executable, *arguments])
    descriptors = open_descriptors()
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(path)
    about = {"executable": executable, "env": dict(os.environ), "cwd": os.getcwd(), "descriptors": descriptors}
    data = json.dumps({**program, **about}).encode()
    socket.send_fds(connection, [len(data).to_bytes(8, "little")], descriptors)
    connection.sendall(data)
    for number in FORWARDED:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda received, _frame: connection.send(bytes([received])))
    for descriptor in descriptors:
        if descriptor > 2:
            os.close(descriptor)
    answer = connection.recv(100)
    if not answer:
        sys.exit("warm_server.py has ended")
    end_as(json.loads(answer)[1])


main()
