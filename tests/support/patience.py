"""For tests of what has to happen soon: on a busy machine a process may not run for a second."""

from __future__ import annotations

import re
from collections.abc import Callable

TRIES = 5


def check_soon(limit: float, attempt: Callable[[], float]) -> None:
    """Fail unless one of some attempts took less than ``limit`` seconds, which each returns.

    What is late by itself is late each time. All else that an attempt asserts has to hold each time.
    """
    for _ in range(TRIES):
        seconds = attempt()
        if seconds < limit:
            return
    raise AssertionError(f"took {seconds:.3f} s the last of {TRIES} times, but {limit} s are allowed")


def with_growing_timeouts(attempt: Callable[[int], object], timeouts: tuple[int, ...] = (1, 4, 16)) -> None:
    """Run a test of ranks with a short timeout, in seconds, and with longer ones where what one asserts fails.

    Those who are expected to come in time have more of it then. A rank that dies or hangs is no question of time.
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
