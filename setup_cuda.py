"""Builds ``ourddp/_cuda``, the library for CUDA devices, for ``setup.py``.

It needs nvcc, and neither a GPU nor a torch with CUDA: nothing of torch is in it, the runtime of CUDA is linked into
it, and the driver and NCCL are looked for when it is used.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent
OLDEST_CUDA = (11, 8)
NVCC_FOLDERS = ("CUDA_HOME", "CUDA_PATH")
# Compiled for A100 and H100 with their kin. What is newer compiles intermediate code (PTX) for itself when it loads the
# library: that of the newest that the compiler knows, or of H100, as it takes none that is newer than itself.
CODES = ("80", "90")
# Fused multiplication and addition would round less often than the CPU does.
EXACT = ["-fmad=false", "-prec-div=true", "-ftz=false"]
# What of the other layers is in it.
SHARED = [
    "common/background_thread.cpp",
    "common/descriptors.cpp",
    "common/dtype.cpp",
    "common/error.cpp",
    "common/owning_process.cpp",
    "kernels/plan.cpp",
    "kernels/reduction.cpp",
    "device/device_checks.cpp",
    "device/deferred_release.cpp",
    "device/wait_reached.cpp",
    "collectives/call_number.cpp",
    "collectives/call_record.cpp",
    "collectives/device/device_opening.cpp",
    "collectives/device/device_group_base.cpp",
    "collectives/device/enqueue_group.cpp",
    "collectives/exchange_plan.cpp",
    "collectives/group.cpp",
    "collectives/op.cpp",
]


class BuildError(Exception):
    """A command of the build failed; what it said has been printed."""


@dataclass(frozen=True)
class Cuda:
    """A CUDA to compile with."""

    version: str
    nvcc: str
    include_dir: str
    library_dir: str
    codes: list[str]
    newest: str

    def targets(self) -> str:
        """Return what it compiles for, for people."""
        codes = [f"sm_{code}" for code in self.codes]
        return " ".join([*codes, *[f"PTX {code}" for code in self.intermediate()]])

    def intermediate(self) -> list[str]:
        """Return for what PTX is kept."""
        return sorted({self.codes[-1], self.newest}, key=int)

    def generate(self) -> list[str]:
        """Return nvcc's flags that say so."""
        made = [(code, f"sm_{code}") for code in self.codes]
        made += [(code, f"compute_{code}") for code in self.intermediate()]
        return [word for code, kind in made for word in ("-gencode", f"arch=compute_{code},code={kind}")]


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
    """Return the CUDA of which ``nvcc`` is the compiler, or one phrase that says why it will not do."""
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


@dataclass(frozen=True)
class Plan:
    """What to compile, and how."""

    cuda: Cuda
    warnings_are_errors: bool
    objects: Path
    target: Path

    def sources(self) -> list[Path]:
        """Return the files in the order of how long they take."""
        csrc = ROOT / "csrc"
        own = [*sorted((csrc / "cuda").glob("*.cu"), reverse=True), *sorted((csrc / "cuda").glob("*.cpp"))]
        return [*own, *[csrc / path for path in SHARED]]

    def command(self, source: Path) -> list[str]:
        """Return how to compile ``source``, without the names of what comes of it."""
        warnings = ["-Wall", "-Wextra"] + (["-Werror"] if self.warnings_are_errors else [])
        common = ["-std=c++17", "-O3", "-I", str(ROOT / "csrc")]
        if source.suffix == ".cu":
            host = ",".join(["-fPIC", "-fvisibility=hidden", "-ffp-contract=off", *warnings])
            strict = ["--Werror", "all-warnings"] if self.warnings_are_errors else []
            return [self.cuda.nvcc, *common, *self.cuda.generate(), *EXACT, *strict, "-Xcompiler", host]
        command = [*shlex.split(os.environ.get("CXX", "c++")), *common, *warnings, "-fPIC", "-pthread"]
        command += ["-fvisibility=hidden", "-fvisibility-inlines-hidden", "-ffp-contract=off"]
        # The compiler's own would come in another order then, in which its headers do not find each other.
        if self.cuda.include_dir not in ("/usr/include", "/usr/local/include"):
            command += ["-isystem", self.cuda.include_dir]
        return [*command, f'-DOURS_CUDA_ARCHITECTURES="{self.cuda.targets()}"']

    def link(self, objects: list[Path]) -> list[str]:
        """Return how to link them."""
        return [
            *shlex.split(os.environ.get("CXX", "c++")),
            *["-shared", "-pthread", *map(str, objects), "-o", str(self.target), f"-L{self.cuda.library_dir}"],
            *["-lcudart_static", "-ldl", "-lrt", "-Wl,--exclude-libs,ALL", "-Wl,-z,defs"],
            f"-Wl,--version-script,{ROOT / 'csrc' / 'cuda' / 'exports.map'}",
        ]


def _is_current(made: Path, command: list[str]) -> bool:
    """Return whether ``made`` was made by ``command`` of what is there now."""
    record, dependencies = made.with_suffix(".command"), made.with_suffix(".d")
    if not made.is_file() or not record.is_file() or record.read_text() != shlex.join(command):
        return False
    # "made: dependency dependency ..."; nvcc has a space before the colon.
    names = dependencies.read_text().replace("\\\n", " ").partition(":")[2].split()
    return all(Path(name).is_file() and Path(name).stat().st_mtime <= made.stat().st_mtime for name in names)


def _run(command: list[str], says: str) -> None:
    print(says, flush=True)
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.stdout:
        print(done.stdout, flush=True)
    if done.returncode != 0:
        raise BuildError(f"this command failed: {shlex.join(command)}")


def build(plan: Plan) -> None:
    """Compile what has changed, some files at a time, and link. Raises BuildError, and leaves no library then."""
    plan.objects.mkdir(parents=True, exist_ok=True)
    plan.target.parent.mkdir(parents=True, exist_ok=True)
    plan.target.unlink(missing_ok=True)

    def compile_one(source: Path) -> Path:
        made = plan.objects / (str(source.relative_to(ROOT)).replace("/", "-") + ".o")
        command = plan.command(source)
        if not _is_current(made, command):
            outputs = ["-MMD", "-MF", str(made.with_suffix(".d")), "-c", str(source), "-o", str(made)]
            _run(command + outputs, f"compiling {source.relative_to(ROOT)} for CUDA")
            made.with_suffix(".command").write_text(shlex.join(command))
        return made

    with ThreadPoolExecutor(int(os.environ.get("MAX_JOBS") or os.cpu_count() or 1)) as pool:
        objects = list(pool.map(compile_one, plan.sources()))
    _run(plan.link(objects), f"linking {plan.target.name}")
