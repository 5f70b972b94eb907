"""Lets Ctrl-C end a program of many ranks with one line from each, instead of as many tracebacks."""

from __future__ import annotations

import os
import sys
import time
from types import TracebackType

# Launchers interrupt ranks one after the other, so a rank may notice first that another one has left.
GRACE_SECONDS = 0.5


def in_one_line() -> None:
    """Have uncaught interrupts reported on stderr as ``rank 3: interrupted`` from now on.

    Other exceptions are reported as before; a RuntimeError half a second later, in case an interrupt follows it.
    """
    sys.excepthook = _report


def _report(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    try:
        if issubclass(kind, RuntimeError):
            time.sleep(GRACE_SECONDS)
    except KeyboardInterrupt:
        kind = KeyboardInterrupt
    if issubclass(kind, KeyboardInterrupt):
        # torch replaces sys.stderr while it lets this run, and puts the rank before each line.
        rank = os.environ.get("RANK")
        print(f"rank {rank}: interrupted" if rank else "interrupted", file=sys.__stderr__, flush=True)
    else:
        sys.__excepthook__(kind, error, traceback)
