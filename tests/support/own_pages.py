"""The memory that the kernel counts for this process."""

from __future__ import annotations

import re
from pathlib import Path


def pages() -> dict[str, int]:
    """Return the kernel's counts of this process's pages, such as VmHWM, VmRSS and RssAnon, in bytes."""
    counts = re.findall(r"^(\w+):\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    return {name: int(count) << 10 for name, count in counts}


def shared_bytes() -> int:
    """Return this process's share of the memory that it has in common with ranks of its node, in bytes."""
    share, counts = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split()[0]:  # the head of a mapping
            counts = "/memfd:ours" in line
        elif counts and line.startswith("Pss:"):
            share += int(line.split()[1]) << 10
    return share
