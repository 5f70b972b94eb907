"""For tests of time limits on a busy machine, where a process may not run for a second."""

from __future__ import annotations

import re
from collections.abc import Callable

TRIES = 5


def check_soon(limit: float, attempt: Callable[[], float]) -> None:
    """Fail unless one of some attempts, each of which returns its seconds, took less than ``limit``.

    What is too slow by itself is too slow each time. Everything else that an attempt asserts has to hold each time.
    """
    for _ in range(TRIES):
        seconds = attempt()
        if seconds < limit:
            return
    raise AssertionError(f"took {seconds:.3f} s the last of {TRIES} times, but {limit} s are allowed")


def with_growing_timeouts(attempt: Callable[[int], object], timeouts: tuple[int, ...] = (1, 4, 16)) -> None:
    """Run a test of ranks with a short timeout in seconds, and again with longer ones if one of its assertions fails.

    A longer timeout gives slow ranks more time to arrive. A rank that dies or hangs fails the test at once.
    """
    *short, longest = timeouts
    for timeout in short:
        try:
            attempt(timeout)
        except AssertionError as error:
            if re.search(r"died of|did not finish in", str(error)):
                raise
            continue
        return
    attempt(longest)
