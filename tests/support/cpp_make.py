"""Builds targets of the C++ tests' Makefile, with the core that setup.py has compiled where it is up to date."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from ourddp import _build_info

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 900


def _is_current(core: Path) -> bool:
    """Return whether ``core``, which setup.py makes where it builds the package, is newer than its sources."""
    parts = ("common", "kernels", "device", "transport", "collectives")
    sources = (path for part in parts for path in (ROOT / "csrc" / part).rglob("*.*"))
    return core.is_file() and all(path.stat().st_mtime <= core.stat().st_mtime for path in sources)


def make(target: str, *settings: str) -> Path:
    """Make ``target``, which prints the path of what it makes last. Return the path."""
    return ROOT / _output(target, *settings).splitlines()[-1]


def plan(target: str, *settings: str) -> str:
    """Return the commands that would make ``target``."""
    return _output(target, "--dry-run", *settings)


def _output(target: str, *settings: str) -> str:
    # A surrounding make's flags (its job server, its variables) are not for this one.
    environment = {k: v for k, v in os.environ.items() if k not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")}
    jobs = f"-j{len(os.sched_getaffinity(0))}"
    command = ["make", "--no-print-directory", jobs, "-C", str(ROOT), "-f", "tests/cpp/Makefile", target, *settings]
    core = Path("build", f"{sys.implementation.cache_tag}-torch-{_build_info.TORCH_VERSION}", "core.a")
    if _is_current(ROOT / core):
        command.append(f"CORE_ARCHIVE={core}")
    made = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    if made.returncode != 0:
        raise RuntimeError(f"{target} cannot be built:\n{made.stdout[-3000:]}{made.stderr[-3000:]}")
    return made.stdout
