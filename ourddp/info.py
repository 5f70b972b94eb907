"""Tells how this copy of ourddp was built, what the node offers it, and which backends torch has.

``python -m ourddp info`` prints it; ``collect`` returns the same facts to programs.
"""

from __future__ import annotations

import ctypes
import os
import platform
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import ourddp
from ourddp import _C, _build_info, processes

Report = dict[str, dict[str, str]]

# The instruction sets for which reductions may be compiled, as Linux spells them.
CPU_FEATURES = ("avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512_bf16", "asimd", "asimdhp", "bf16", "sve")
DRIVER = Path("/proc/driver/nvidia/version")
BACKENDS = ("ours", "gloo", "nccl", "mpi", "ucc")


def collect() -> Report:
    """Return the facts by section and name, in the order in which they are printed."""
    return {"versions": versions(), "engines": engines(), "node": node(), "backends": backends(), "options": options()}


def versions() -> dict[str, str]:
    """Return the versions of what is running, and of what the extension was compiled with."""
    return {
        "ourddp": ourddp.__version__,
        "torch": f"{torch.__version__} (built for {_build_info.TORCH_VERSION})",
        "python": f"{platform.python_version()} (built for {_build_info.PYTHON_VERSION})",
        "compiler": _build_info.COMPILER,
        "flags": _build_info.FLAGS,
    }


def engines() -> dict[str, str]:
    """Return what can move data: shared memory, which is always there, and each optional engine."""
    library = _cuda_library()
    if library is None:
        return {"shared memory": "on", **_build_info.ENGINES, "NCCL": "off: it needs CUDA"}
    found = cuda(_C.device_facts("cuda"), _C.option_values()["OURS_DEVICE_ENGINE"])
    found["CUDA library"] = str(library)
    return {"shared memory": "on", **_build_info.ENGINES, **found}


def cuda(facts: dict[str, Any], wish: str = "auto") -> dict[str, str]:
    """Return in words what ``facts`` (see ``_C.device_facts``) mean for collectives of tensors on CUDA devices.

    ``wish`` is the value of OURS_DEVICE_ENGINE.
    """
    if facts["obstacle"]:
        return {"CUDA": f"off: {facts['obstacle']}", "NCCL": "off: it needs CUDA"}
    names = facts["devices"]
    seen = f"{len(names)} devices: {', '.join(sorted(set(names)))}" if names else "no GPU here"
    engine = _device_engine(len(names), not facts["vendor_obstacle"], wish)
    nccl = f"on: {facts['vendor_version']}, where each rank has a device of its own"
    return {
        "CUDA": f"on: {facts['library']}; {seen}",
        "NCCL": f"off: {facts['vendor_obstacle']}" if facts["vendor_obstacle"] else nccl,
        "CUDA tensors": engine,
    }


def _device_engine(devices: int, nccl: bool, wish: str) -> str:
    """Return what would move the data of device tensors among ranks of this node."""
    if devices == 0:
        return "none: there is no GPU here"
    if wish != "auto":
        return f"by {wish}, for which OURS_DEVICE_ENGINE asks"
    others = "by ipc on one node, where the devices reach each other, else by staging"
    if not nccl:
        return others
    own = "nccl where each rank has a device of its own"
    return f"by {own} (up to {devices} ranks here), else {others}"


def node() -> dict[str, str]:
    """Return what this node offers to ranks that share it."""
    usable = processes.cores()
    facts = _C.device_facts("cuda") if _cuda_library() else {}
    return {
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cores": f"{usable} usable of {os.cpu_count()}",
        "memory": f"{_memory_bytes() / 2**30:.1f} GiB",
        "GPUs": gpus(facts.get("devices") or torch.cuda.device_count(), facts.get("device_obstacle", "")),
        "cpu features": " ".join(_cpu_features()) or "none that matter here",
        "memfd": _yes(_memfd_works(), "ranks of one node cannot share memory without it"),
        "pidfd": _yes(_pidfd_works(), "a dead rank is noticed more slowly without it"),
        "/proc": _yes(Path("/proc/self/fd").is_dir(), "ranks cannot open each other's memory without it"),
        "boot id": _yes(_boot_id_is_readable(), "ranks cannot tell whether they share a node"),
    }


def gpus(found: list[str] | int, obstacle: str) -> str:
    """Return which GPUs programs see here, or why none.

    ``found`` is their names or number, and ``obstacle`` what the package's library for CUDA says.
    """
    if found:
        return str(found) if isinstance(found, int) else ", ".join(found)
    if not DRIVER.exists():
        return "no GPU here: no NVIDIA driver is loaded"
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    if hidden is not None:
        return f"no GPU here: CUDA_VISIBLE_DEVICES={hidden!r} hides those that there may be"
    return f"no GPU here: {obstacle or 'the driver shows none'}"


def selection(table: str) -> list[dict[str, str]]:
    """Split a table of algorithms, as ``_C.selection_table`` prints it, into its rules and the reason for each."""
    rules = [line.partition("#") for line in table.splitlines()]
    return [{"rule": " ".join(rule.split()), "why": why.strip()} for rule, _, why in rules]


def backends() -> dict[str, str]:
    """Return which c10d backends this torch can make, with the devices that each serves."""
    capability = dist.Backend.backend_capability
    available = {
        "gloo": dist.is_gloo_available(),
        "nccl": dist.is_nccl_available(),
        "mpi": dist.is_mpi_available(),
        "ucc": dist.is_ucc_available(),
    }
    return {
        name: f"for {', '.join(capability.get(name, []))}" if available.get(name, name in capability) else "not built"
        for name in BACKENDS
    }


def options() -> dict[str, str]:
    """Return the environment variables that change a default; ValueError if one is not understood."""
    defaults = {row["name"]: row["default"] for row in _C.option_table()}
    return {name: value for name, value in _C.option_values().items() if value != defaults[name]}


def render(report: Report) -> str:
    """Return ``report`` as text for people."""
    lines = []
    for section, facts in report.items():
        lines.append(section)
        width = max((len(name) for name in facts), default=0)
        lines += [f"  {name:<{width}}  {value}".rstrip() for name, value in facts.items()] or [
            "  all at their defaults"
        ]
    return "\n".join(lines)


OPTIONS_HEAD = [
    "# Options",
    "",
    "All options are environment variables, which each process reads once. A value that is not understood is an error.",
    "A variable that begins with `OURS_` and that nothing reads causes a warning, which suggests the nearest name.",
    "`python -m ourddp options` prints the values in force; `python -m ourddp options --markdown` printed this page.",
    "",
]


def options_markdown() -> str:
    """Return the page docs/options.md."""
    lines = [*OPTIONS_HEAD, "| Variable | Default | Accepted | Meaning |", "| --- | --- | --- | --- |"]
    for row in _C.option_table():
        default = f"`{row['default']}`" if row["default"] else "empty"
        lines.append(f"| `{row['name']}` | {default} | {row['accepted']} | {row['help']} |")
    return "\n".join(lines)


def _yes(good: bool, otherwise: str) -> str:
    return "yes" if good else f"no: {otherwise}"


def _cuda_library() -> Path | None:
    return next(Path(_C.__file__).parent.glob("_cuda.*.so"), None)


def _memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _cpu_features() -> list[str]:
    words: set[str] = set()
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.lower().startswith(("flags", "features")):
                words.update(line.partition(":")[2].split())
                break
    except OSError:
        return []
    return [name for name in CPU_FEATURES if name in words]


def _memfd_works() -> bool:
    try:
        _C.NodeProbe()
    except RuntimeError:
        return False
    return True


def _pidfd_works() -> bool:
    # glibc wraps the call only since 2.36, so the number is used: it is the same on every architecture.
    pidfd_open = 434
    descriptor = ctypes.CDLL(None, use_errno=True).syscall(pidfd_open, os.getpid(), 0)
    if descriptor >= 0:
        os.close(descriptor)
    return descriptor >= 0


def _boot_id_is_readable() -> bool:
    try:
        return bool(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
    except OSError:
        return False
