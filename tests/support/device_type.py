"""The device that the tests of device tensors use, on any machine: host memory, and threads as streams.

``load()`` makes it torch's device type ``standin`` in this process, and tells the package which library serves it. What
has to be compiled lies in build/, by what it is made of.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

import cpp_make
import torch

from ourddp import _C

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ROOT / "tests" / "support" / "stand_in_torch"
NAME = "standin"
BUILT = "STAND_IN_BUILT"  # an environment variable
MODULE = "stand_in_torch"


def missing_tool() -> str | None:
    """Return which tool is missing to compile the device, or None."""
    tools = ("make", os.environ.get("CXX", "c++").split()[0])
    return next((tool for tool in tools if shutil.which(tool) is None), None)


def _compile(library: Path, target: Path) -> None:
    from torch.utils import cpp_extension  # takes its time, which ranks that compile nothing shall not lose

    # The standard is that of torch's headers.
    standard = "c++20" if tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 12) else "c++17"
    includes = [*cpp_extension.include_paths(), sysconfig.get_paths()["include"]]
    folders = [*cpp_extension.library_paths(), str(library.parent)]
    compiler = [*os.environ.get("CXX", "c++").split(), f"-std={standard}", "-O1", "-g0", "-fPIC", "-pthread"]
    defines = [f"-DTORCH_EXTENSION_NAME={MODULE}", "-DTORCH_API_INCLUDE_EXTENSION_H"]
    own = [f"-I{ROOT / 'csrc'}", f"-I{ROOT / 'tests' / 'cpp'}"]
    flags = [*compiler, *defines, *own, *(word for path in includes for word in ("-isystem", path))]
    objects = {source: str(target.with_name(f"{source.stem}.o")) for source in sorted(SOURCES.glob("*.cpp"))}
    # Each takes many seconds for torch's headers, so they are compiled at the same time.
    _run_all([[*flags, "-c", str(source), "-o", made] for source, made in objects.items()])
    link = [*compiler, "-shared", *objects.values(), "-o", str(target), f"-l:{library.name}"]
    link += [flag for folder in folders for flag in (f"-L{folder}", f"-Wl,-rpath,{folder}")]
    _run_all([[*link, "-lc10", "-ltorch", "-ltorch_cpu", "-ltorch_python"]])


def _run_all(commands: list[list[str]]) -> None:
    """Run commands at the same time, as many as there are cores."""
    run = functools.partial(subprocess.run, capture_output=True, text=True, timeout=900, check=False)
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        for command, made in zip(commands, pool.map(run, commands), strict=True):
            if made.returncode != 0:
                raise RuntimeError(f"{' '.join(command)}\n{made.stderr[-5000:]}")


@functools.cache
def build() -> tuple[Path, Path]:
    """Compile what has changed; return the library with the devices, and the module that makes them torch's."""
    if BUILT in os.environ:
        library, module = os.environ[BUILT].split(os.pathsep)
        return Path(library), Path(module)
    folder = ROOT / "build" / "stand_in"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        library = cpp_make.make("stand_in")
        return library, _module(folder, library)


def environment() -> dict[str, str]:
    """Return what other processes need in their environment to take what this one has built, and to look no further."""
    return {BUILT: os.pathsep.join(map(str, build()))}


def _module(folder: Path, library: Path) -> Path:
    # The library too, which the module loads from where it was: two in one process do not know each other's streams.
    digest = hashlib.sha256("\n".join([torch.__version__, sysconfig.get_paths()["include"], str(library)]).encode())
    headers = [(ROOT / "csrc" / "device").glob("*.h"), (ROOT / "tests" / "cpp" / "support").glob("stand_in*.h")]
    for path in sorted([*SOURCES.iterdir(), *headers[0], *headers[1]]):
        digest.update(path.read_bytes())
    target = folder / digest.hexdigest()[:16] / f"{MODULE}{sysconfig.get_config_var('EXT_SUFFIX')}"
    if target.is_file():
        return target
    target.parent.mkdir(exist_ok=True)
    _compile(library, target)
    return target


@functools.cache
def load() -> ModuleType:
    """Make the device torch's in this process; return the module that drives it."""
    library, path = build()
    specification = importlib.util.spec_from_file_location(MODULE, path)
    assert specification is not None
    assert specification.loader is not None
    torch.utils.rename_privateuse1_backend(NAME)
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    module.is_available = lambda: True  # type: ignore[attr-defined]
    module.is_initialized = lambda: True  # type: ignore[attr-defined]
    module._is_in_bad_fork = lambda: False  # type: ignore[attr-defined]
    module.manual_seed_all = lambda seed: None  # type: ignore[attr-defined]
    torch._register_device_module(NAME, module)
    _C.use_device_library(NAME, str(library))
    return module
