"""Builds ``ourddp/_cuda``, the library for CUDA devices, for ``setup.py``.

It needs nvcc, but neither a GPU nor a torch with CUDA: it contains nothing of torch, the CUDA runtime is linked into
it, and it looks for the driver and NCCL when it is used.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from setup_ninja import CXX, CXXFLAGS, LDFLAGS, Build, sources

ROOT = Path(__file__).resolve().parent
OLDEST_CUDA = (11, 8)
NVCC_FOLDERS = ("CUDA_HOME", "CUDA_PATH")
# It is compiled for the generations of A100 and H100. Newer GPUs compile intermediate code (PTX) when they load the
# library. There is PTX for the newest GPU that nvcc knows and for H100, since a GPU cannot use PTX that is newer than
# it.
CODES = ("80", "90")
# Fused multiply-add would round less often than the CPU does.
EXACT = ["-fmad=false", "-prec-div=true", "-ftz=false"]


@dataclass(frozen=True)
class Cuda:
    """A CUDA toolkit to compile with."""

    version: str
    nvcc: str
    include_dir: str
    library_dir: str
    codes: list[str]
    newest: str

    def __str__(self) -> str:
        return f"CUDA {self.version}, {self.targets()} ({self.nvcc})"

    def targets(self) -> str:
        """Return the targets as text for people."""
        codes = [f"sm_{code}" for code in self.codes]
        return " ".join([*codes, *[f"PTX {code}" for code in self.intermediate()]])

    def intermediate(self) -> list[str]:
        """Return the targets for which PTX is kept."""
        return sorted({self.codes[-1], self.newest}, key=int)

    def generate(self) -> list[str]:
        """Return nvcc's flags for these targets."""
        made = [(code, f"sm_{code}") for code in self.codes]
        made += [(code, f"compute_{code}") for code in self.intermediate()]
        return [word for code, kind in made for word in ("-gencode", f"arch=compute_{code},code={kind}")]

    def compiler(self, kind: str, warnings_are_errors: bool) -> list[str]:
        """Return the command that compiles files of this ``kind``, ``.cu`` or ``.cpp``, without their names."""
        warnings = ["-Wall", "-Wextra"] + (["-Werror"] if warnings_are_errors else [])
        common = ["-std=c++17", "-O3", "-I", str(ROOT / "csrc")]
        if kind == ".cu":
            host = ",".join(["-fPIC", "-fvisibility=hidden", "-ffp-contract=off", *warnings])
            strict = ["--Werror", "all-warnings"] if warnings_are_errors else []
            return [self.nvcc, *common, *self.generate(), *EXACT, *strict, "-Xcompiler", host]
        command = [*CXX, *common, *warnings, "-fPIC", "-pthread"]
        command += ["-fvisibility=hidden", "-fvisibility-inlines-hidden", "-ffp-contract=off"]
        # Otherwise the compiler's own folders would come in an order in which its headers do not find each other.
        if self.include_dir not in ("/usr/include", "/usr/local/include"):
            command += ["-isystem", self.include_dir]
        return [*command, *CXXFLAGS, f'-DOURS_CUDA_ARCHITECTURES="{self.targets()}"']

    def add_library(self, build: Build, core: Path, target: Path, warnings_are_errors: bool) -> None:
        """Add the library for CUDA to ``build``; ``core`` is a static library of the layers below."""
        objects = []
        for kind in (".cu", ".cpp"):
            objects += build.compile(sources(f"cuda/*{kind}"), self.compiler(kind, warnings_are_errors))
        exports = ROOT / "csrc" / "cuda" / "exports.map"
        link = [*CXX, "-shared", "-pthread", *map(str, objects), str(core), "-o", str(target)]
        link += [*LDFLAGS, f"-L{self.library_dir}", "-lcudart_static", "-ldl", "-lrt", "-Wl,--exclude-libs,ALL"]
        link += ["-Wl,-z,defs", f"-Wl,--version-script,{exports}"]
        build.add(target, link, [*objects, core, exports])


def _output(command: list[str]) -> str:
    """Return what a command prints, or an empty string if it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def _version_of(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("."))


def _obstacle_to_compiling(cuda: Cuda) -> str:
    """Return why nvcc does not work with this machine's C++ compiler; empty if it does."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "probe.cu"
        source.write_text("#include <vector>\n__global__ void probe() {}\n")
        command = [cuda.nvcc, f"-arch=sm_{cuda.codes[0]}", "-c", str(source), "-o", str(source.with_suffix(".o"))]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=300)
    if done.returncode == 0:
        return ""
    said = [line.strip() for line in done.stdout.splitlines() if "error" in line]
    return f"{cuda.nvcc} does not compile with this machine's C++ compiler" + (f" ({said[0]})" if said else "")


def find_nvcc() -> str:
    """Return the CUDA compiler's path, or an empty string."""
    homes = [Path(os.environ[name]) for name in NVCC_FOLDERS if os.environ.get(name)] + [Path("/usr/local/cuda")]
    on_path = [Path(folder) for folder in os.environ.get("PATH", "").split(os.pathsep) if folder]
    candidates = [folder / "nvcc" for folder in [*(home / "bin" for home in homes), *on_path]]
    return next((str(path) for path in candidates if path.is_file()), "")


def find_cuda(nvcc: str) -> Cuda | str:
    """Return the CUDA toolkit that ``nvcc`` belongs to, or a phrase that says why it cannot be used."""
    if not nvcc:
        return "found no nvcc"
    release = re.search(r"release (\d+\.\d+)", _output([nvcc, "--version"]))
    if release is None:
        return f"{nvcc} does not tell its version"
    if _version_of(release[1]) < OLDEST_CUDA:
        return f"{nvcc} is of CUDA {release[1]}, which is older than {OLDEST_CUDA[0]}.{OLDEST_CUDA[1]}"
    known = re.findall(r"sm_(\d+)\b", _output([nvcc, "--list-gpu-code"]))
    codes = [code for code in CODES if code in known] or sorted(known, key=int)[:1]
    home = Path(nvcc).resolve().parent.parent
    include_dirs = [home / "include", *home.glob("targets/*/include")]
    library_dirs = [home / "lib64", home / "lib", *home.glob("targets/*/lib")]
    include_dir = next((str(path) for path in include_dirs if (path / "cuda_runtime_api.h").is_file()), "")
    library_dir = next((str(path) for path in library_dirs if (path / "libcudart_static.a").is_file()), "")
    if not codes or not include_dir or not library_dir:
        missing = "cuda_runtime_api.h" if not include_dir else "libcudart_static.a" if not library_dir else "devices"
        return f"{nvcc} has no {missing} beside it"
    cuda = Cuda(release[1], nvcc, include_dir, library_dir, codes, max(known, key=int))
    return _obstacle_to_compiling(cuda) or cuda
