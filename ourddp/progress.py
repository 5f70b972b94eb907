"""Shows how far a command is: a bar on a terminal, and a line a step where the output is piped or written to a file."""

from __future__ import annotations

import time
from typing import TextIO

WIDTH = 20  # characters of the bar


class Progress:
    """Shows the steps of a command on a stream, or nothing if there is none."""

    def __init__(self, stream: TextIO | None, unit: str = "sizes") -> None:
        self._stream = stream
        self._unit = unit  # what the steps are
        self._start = time.monotonic()
        self._bar = stream is not None and stream.isatty()

    def show(self, done: int, steps: int, text: str) -> None:
        """Show that ``done`` of ``steps`` are done, and in ``text`` what comes next."""
        if self._stream is None:
            return
        line = f"{done} of {steps} {self._unit}, {time.monotonic() - self._start:.0f} s, {text}"
        if self._bar:
            full = WIDTH * done // steps
            line = f"\r\x1b[K[{'#' * full}{'.' * (WIDTH - full)}] {line}"
        print(line, end="" if self._bar else "\n", file=self._stream, flush=True)

    def close(self) -> None:
        """Remove the bar."""
        if self._bar:
            print("\r\x1b[K", end="", file=self._stream, flush=True)
