"""Builds the one extension module, ``ourddp._C``, from the C++ files under ``csrc/``.

Only what needs MPI or CUDA is in libraries of their own, ``ourddp._mpi`` and ``ourddp._cuda``, so that the package is
imported where there is none.

Environment, all optional:

``OURS_WITH_CUDA``, ``OURS_WITH_MPI``
    ``auto`` (default), ``0`` or ``1``. A ``1`` that cannot be honoured is an error.
``OURS_WERROR``
    ``0`` (default) or ``1``: compiler warnings are errors. The Makefile sets it for those who change the code; whoever
    only installs it may have a compiler that warns about more.
``MAX_JOBS``
    Compile jobs at a time.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import platform
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from setuptools import Extension, setup

# pip does not run this file from its own folder.
sys.path.insert(0, str(Path(__file__).resolve().parent))

import setup_cuda
import setup_mpi

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


def wish_for(name: str) -> str:
    """Return whether the optional engine ``name`` is wanted: ``auto``, ``0`` or ``1``."""
    return setup_mpi.flag(f"OURS_WITH_{name}", "auto", ("auto", "0", "1"))


def chosen_mpi() -> tuple[setup_mpi.Mpi | None, str]:
    """Return the MPI to build with, if one is wanted and there, and one phrase for the report."""
    wish = wish_for("MPI")
    if wish == "0":
        return None, "off, as asked"
    found = setup_mpi.find_mpi()
    if isinstance(found, setup_mpi.Mpi):
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
    warnings_are_errors = setup_mpi.flag("OURS_WERROR", "0", ("0", "1")) == "1"
    flags = ["-O3", "-g0", "-fvisibility=hidden", "-fvisibility-inlines-hidden", "-ffp-contract=off", "-pthread"]
    flags += ["-Wall", "-Wextra"] + (["-Werror"] if warnings_are_errors else [])
    # Assertions in headers name their files. A wheel goes to others, whom this machine's folders do not concern.
    flags += [f"-ffile-prefix-map={folder}/=" for folder in (ROOT, Path(torch.__file__).parent.parent)]
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
        built.append(
            Extension(
                MPI_LIBRARY,
                sorted(with_mpi | set(sources("engines/mpi_plan.cpp", "common/descriptors.cpp", "common/error.cpp"))),
                include_dirs=[str(ROOT / "csrc"), *MPI.include_dirs],
                library_dirs=MPI.library_dirs,
                libraries=MPI.libraries,
                extra_link_args=["-pthread"],
                **common,
            )
        )
    if CUDA is not None:
        built.append(Extension(CUDA_LIBRARY, [], optional=True))  # by BuildExtension, which may leave it out
    return built


def build_info(flags: list[str], engines: dict[str, str]) -> str:
    """Return the text of ``ourddp/_build_info.py``, which names tools without the folders of the machine that built."""
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
    """Wait for other builds in this folder: two that write the same object files would spoil both."""
    folder = ROOT / "build"
    folder.mkdir(exist_ok=True)
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


FLAGS = compile_flags()
MPI, MPI_REPORT = chosen_mpi()
CUDA, CUDA_REPORT = chosen_cuda()
MPI_LIBRARY, CUDA_LIBRARY = "ourddp._mpi", "ourddp._cuda"
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
        if MPI is not None and extension.name == MPI_LIBRARY:
            extension.extra_link_args += [f"-Wl,-rpath,{one}" for one in MPI.runtime_dirs(self.stays_here)]
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
        self.stays_here = bool(self.inplace)  # setuptools says no while it builds, and copies what it has built
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
    # torch itself does without numpy, but warns.
    install_requires=[f"torch=={TORCH_VERSION}", "numpy"],
)
