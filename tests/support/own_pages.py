"""The memory that the kernel counts for this process."""

from __future__ import annotations

import re
from pathlib import Path


def pages() -> dict[str, int]:
    """Return the kernel's counts of this process's pages, such as VmHWM, VmRSS and RssAnon, in bytes."""
    counts = re.findall(r"^(\w+):\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    return {name: int(count) << 10 for name, count in counts}
