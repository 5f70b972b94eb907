"""Builds ``ourddp/libourddp.so`` and the extension module that is linked with it, ``ourddp._C``, from ``csrc/``.

The library has everything but the bindings, so that programs in C++ can use it without Python. The parts that need MPI
or CUDA are libraries of their own, ``ourddp._mpi`` and ``ourddp._cuda``, so that the package can be imported without
these.

Environment, all optional:

``OURS_WITH_CUDA``, ``OURS_WITH_MPI``
    ``auto`` (default), ``0`` or ``1``. A ``1`` that cannot be honoured is an error.
``OURS_WERROR``
    ``0`` (default) or ``1``: compiler warnings are errors. The Makefile sets it for people who change the code. People
    who only install the package may have a compiler that warns about more.
``MAX_JOBS``
    The number of compile jobs at a time.
"""

from __future__ import annotations

import contextlib
import fcntl
import platform
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

# pip does not run this file from its own folder.
sys.path.insert(0, str(Path(__file__).resolve().parent))

import setup_cuda
import setup_mpi
from setup_ninja import CXX, CXXFLAGS, LDFLAGS, Build, BuildError, sources

try:
    import torch
    from torch.utils import cpp_extension
except ImportError as error:
    raise SystemExit(
        "ourddp is compiled against torch, which this Python does not have. Install torch first, "
        "or let pip bring it: pip install . (without --no-build-isolation)"
    ) from error

Part = TypeVar("Part", setup_mpi.Mpi, setup_cuda.Cuda)
ROOT = Path(__file__).resolve().parent
TORCH_VERSION = torch.__version__.partition("+")[0]
# Parsing this takes most of the compile time of every file that needs torch, so it is done once.
TORCH_HEADERS = "#include <torch/csrc/distributed/c10d/Backend.hpp>\n"


def chosen(name: str, find: Callable[[], Part | str]) -> tuple[Part | None, str]:
    """Return what ``find`` finds for the optional engine ``name`` if it is wanted, and a phrase for the report."""
    wish = setup_mpi.wish_for(name)
    if wish == "0":
        return None, "off, as asked"
    found = find()
    if not isinstance(found, str):
        return found, f"on: {found}"
    if wish == "1":
        raise SystemExit(f"OURS_WITH_{name}=1 cannot be honoured: {found}")
    return None, f"off: {found}"


def compiler_name() -> str:
    """Return the first line of the C++ compiler's ``--version``."""
    command = [*CXX, "--version"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[0]


def compile_flags() -> list[str]:
    """Return the flags for all C++ files."""
    warnings_are_errors = setup_mpi.flag("OURS_WERROR", "0", ("0", "1")) == "1"
    # The library's symbols are not hidden, since the module calls them; but nothing may replace them.
    flags = ["-O3", "-g0", "-DNDEBUG", "-fPIC", "-fvisibility-inlines-hidden", "-fno-semantic-interposition"]
    flags += ["-ffp-contract=off", "-pthread", "-Wall", "-Wextra"] + (["-Werror"] if warnings_are_errors else [])
    # Assertions in headers name their files. A wheel is for others, and must not name this machine's folders.
    flags += [f"-ffile-prefix-map={folder}/=" for folder in (ROOT, Path(torch.__file__).parent.parent)]
    return [*flags, "-I", str(ROOT / "csrc"), "-I", str(ROOT / "ourddp" / "include"), *CXXFLAGS]


def torch_flags() -> list[str]:
    """Return the flags for files that need torch. Its headers are system headers, so that they cause no warnings."""
    newer = tuple(map(int, TORCH_VERSION.split(".")[:2])) >= (2, 12)
    flags = ["-std=c++20" if newer else "-std=c++17"]
    flags += ["-DTORCH_API_INCLUDE_EXTENSION_H", "-DTORCH_EXTENSION_NAME=_C"]
    # GCC 12 warns of overflows in its own std::string if that comes from a precompiled header.
    doubtful = ["array-bounds", "restrict", "stringop-overflow", "stringop-overread"]
    flags += [] if "clang" in compiler_name() else [f"-Wno-{name}" for name in doubtful]
    for path in [*cpp_extension.include_paths(), sysconfig.get_paths()["include"]]:
        flags += ["-isystem", path]
    return flags


def build_info(flags: list[str], engines: dict[str, str]) -> str:
    """Return the text of ``ourddp/_build_info.py``, which names tools without the folders of this machine."""
    shown = [word for word in flags if word.startswith("-") and not word.startswith(("-isystem", "-ffile-prefix-map"))]
    for tool in filter(None, (setup_mpi.find_wrapper(), setup_cuda.find_nvcc())):
        engines = {name: report.replace(tool, Path(tool).name) for name, report in engines.items()}
    return (
        '"""Made by setup.py: how this copy of ourddp was built."""\n\n'
        f"TORCH_VERSION = {TORCH_VERSION!r}\n"
        f"PYTHON_VERSION = {platform.python_version()!r}\n"
        f"COMPILER = {compiler_name()!r}\n"
        f"FLAGS = {' '.join(shown)!r}\n"
        f"ENGINES = {engines!r}\n"
    )


@contextlib.contextmanager
def one_build_at_a_time() -> Iterator[None]:
    """Wait for other builds in this folder, since two that write the same object files would spoil both."""
    folder = ROOT / "build"
    folder.mkdir(exist_ok=True)
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


FLAGS = compile_flags()
MPI, MPI_REPORT = chosen("MPI", setup_mpi.find_mpi)
CUDA, CUDA_REPORT = chosen("CUDA", lambda: setup_cuda.find_cuda(setup_cuda.find_nvcc()))
LIBRARY, MODULE, MPI_LIBRARY, CUDA_LIBRARY = "ourddp.libourddp", "ourddp._C", "ourddp._mpi", "ourddp._cuda"
ENGINES = {"CUDA": CUDA_REPORT, "MPI": MPI_REPORT}
# The files that need no torch, which are a part of all libraries.
CORE = [
    *(f"{layer}/**/*.cpp" for layer in ("common", "kernels", "device", "transport", "collectives")),
    "engines/*.cpp",
]
WITH_TORCH = ["engines/c10d/*.cpp", *(f"{layer}/**/*.cpp" for layer in ("backend", "operators", "reducer", "cpp"))]
WITH_PYTHON = ["python/*.cpp"]


class BuildExtension(build_ext):
    """Builds with ninja, in a folder for each torch version so that switching rebuilds nothing; prints a summary."""

    def finalize_options(self) -> None:
        """Use that folder for editable installs too, which would otherwise compile everything in a temporary folder."""
        super().finalize_options()
        self.build_temp = str(ROOT / "build" / f"{sys.implementation.cache_tag}-torch-{TORCH_VERSION}")

    def get_ext_filename(self, fullname: str) -> str:
        """Return the file's name, which for the library has nothing of Python's version."""
        if fullname in (LIBRARY, "libourddp"):  # setuptools asks for names in the package's folder, too
            return f"{fullname.replace('.', '/')}.so"
        return super().get_ext_filename(fullname)

    def build_extension(self, extension: Extension) -> None:
        """Compile what has changed, and link it. If CUDA was not asked for and does not compile, it is left out."""
        folder = Path(self.build_temp)
        target = Path(self.get_ext_fullpath(extension.name)).absolute()
        build = Build(folder)
        core = build.compile(sources(*CORE), [*CXX, "-std=c++17", *FLAGS])
        archive = build.archive(folder / "core.a", core)
        if extension.name == CUDA_LIBRARY:
            assert CUDA is not None
            CUDA.add_library(build, archive, target, "-Werror" in FLAGS)
        elif extension.name == MPI_LIBRARY:
            self.add_mpi(build, archive, target)
        elif extension.name == LIBRARY:
            self.add_library(build, archive, target)
        else:
            self.add_module(build, target)
        try:
            build.make(target)
        except BuildError as error:
            if extension.name != CUDA_LIBRARY:
                raise SystemExit(f"ourddp does not compile: {error}") from error
            if setup_mpi.wish_for("CUDA") == "1":
                raise SystemExit(f"OURS_WITH_CUDA=1 cannot be honoured: {error}") from error
            ENGINES["CUDA"] = f"off: it did not compile with {CUDA.nvcc}; a build with OURS_WITH_CUDA=1 shows why"

    def compile_with_torch(self, build: Build, patterns: list[str]) -> list[Path]:
        """Add the objects of the files that match. Return them."""
        folder = Path(self.build_temp)
        folder.mkdir(parents=True, exist_ok=True)
        header = folder / "torch_headers.h"
        if not header.is_file() or header.read_text() != TORCH_HEADERS:
            header.write_text(TORCH_HEADERS)
        command = [*CXX, *FLAGS, *torch_flags()]
        parsed = Path(f"{header}.gch")  # compilers look for it beside the header
        build.add(
            parsed, [*command, "-x", "c++-header", str(header), "-o", str(parsed), "-MD"], [header], reads_headers=True
        )
        return build.compile(sources(*patterns), [*command, "-include", str(header)], [parsed])

    def add_library(self, build: Build, archive: Path, target: Path) -> None:
        """Add the library, which is linked with torch, but not with Python."""
        objects = self.compile_with_torch(build, WITH_TORCH)
        exports = ROOT / "csrc" / "exports.map"
        link = [*CXX, "-shared", "-pthread", *map(str, objects), "-o", str(target)]
        link += ["-Wl,--whole-archive", str(archive), "-Wl,--no-whole-archive", *LDFLAGS]
        link += ["-Wl,-soname,libourddp.so", f"-Wl,--version-script,{exports}", "-Wl,-Bsymbolic-functions,-z,defs"]
        link += [f"-L{path}" for path in cpp_extension.library_paths()]
        build.add(target, [*link, "-lc10", "-ltorch_cpu", "-ldl"], [*objects, archive, exports])

    def add_module(self, build: Build, target: Path) -> None:
        """Add the extension module, which finds the library beside it."""
        objects = self.compile_with_torch(build, WITH_PYTHON)
        library = Path(self.get_ext_fullpath(LIBRARY)).absolute()
        exports = ROOT / "csrc" / "python" / "exports.map"
        link = [*CXX, "-shared", "-pthread", *map(str, objects), str(library), "-o", str(target), *LDFLAGS]
        link += [f"-L{path}" for path in cpp_extension.library_paths()]
        link += ["-lc10", "-ltorch", "-ltorch_cpu", "-ltorch_python", f"-Wl,-rpath,$ORIGIN,--version-script,{exports}"]
        build.add(target, link, [*objects, library, exports])

    def add_mpi(self, build: Build, archive: Path, target: Path) -> None:
        """Add the library for MPI, which finds MPI's own libraries when it is loaded."""
        assert MPI is not None
        includes = [word for path in MPI.include_dirs for word in ("-isystem", path)]
        command = [*CXX, "-std=c++17", *FLAGS, "-fvisibility=hidden", *includes]
        objects = build.compile(sources("engines/mpi/*.cpp"), command)
        link = [*CXX, "-shared", "-pthread", *map(str, objects), str(archive), "-o", str(target), *LDFLAGS]
        link += ["-Wl,--exclude-libs,ALL"]
        link += [f"-L{path}" for path in MPI.library_dirs] + [f"-l{name}" for name in MPI.libraries]
        link += [f"-Wl,-rpath,{one}" for one in MPI.runtime_dirs(self.stays_here)]
        build.add(target, link, [*objects, archive])

    def run(self) -> None:
        """Print a summary, build, and write ``_build_info.py`` beside the extension."""
        summary = {"torch": TORCH_VERSION, "compiler": compiler_name(), "python": platform.python_version(), **ENGINES}
        print("ourddp build summary")
        for key, value in summary.items():
            print(f"  {key:<9} {value}")
        sys.stdout.flush()
        self.stays_here = bool(self.inplace)  # setuptools clears it during the build, and copies the result afterwards
        package = ROOT / "ourddp" if self.inplace else Path(self.build_lib) / "ourddp"
        with one_build_at_a_time():
            super().run()
            for name, pattern in (("MPI", "_mpi.*.so"), ("CUDA", "_cuda.*.so")):
                for left in package.glob(pattern) if ENGINES[name].startswith("off") else []:
                    left.unlink()
        if CUDA is not None and ENGINES["CUDA"].startswith("off"):
            print(f"ourddp build warning: CUDA is {ENGINES['CUDA']}", file=sys.stderr, flush=True)
        (package / "_build_info.py").write_text(build_info(FLAGS, ENGINES))


def extensions() -> list[Extension]:
    """Return what to build: the module after the library that it needs, and last the one for CUDA, which is slow."""
    there = {LIBRARY: True, MODULE: True, MPI_LIBRARY: MPI is not None, CUDA_LIBRARY: CUDA is not None}
    return [Extension(name, [], optional=name == CUDA_LIBRARY) for name, wanted in there.items() if wanted]


setup(
    ext_modules=extensions(),
    cmdclass={"build_ext": BuildExtension},
    # torch works without numpy, but warns.
    install_requires=[f"torch=={TORCH_VERSION}", "numpy"],
)
