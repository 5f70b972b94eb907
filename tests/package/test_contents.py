"""The contents of the package: its libraries, its source distribution, its declared requirements and its stubs."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from programs import run_python

import ourddp
from ourddp import _C, _build_info

ROOT = Path(__file__).resolve().parents[2]
LIBRARY = ROOT / "ourddp" / "libourddp.so"


def test_a_build_contains_no_paths_of_this_machine():
    # A build in place has the path of MPI, but a wheel does not (tests/package/test_build.py).
    for file in [_C.__file__, LIBRARY, _build_info.__file__]:
        content = Path(file).read_bytes()
        for folder in (ROOT, Path(torch.__file__).parent.parent):
            assert f"{folder}/".encode() not in content, file


def test_the_requirements_of_the_examples_are_declared():
    project = (ROOT / "pyproject.toml").read_text()
    assert re.search(r'^examples = \["matplotlib", "scikit-learn", "tqdm"\]', project, re.MULTILINE)
    imported = {
        name
        for path in (ROOT / "examples").glob("*.py")
        for name in re.findall(r"^\s*(?:import|from) (\w+)", path.read_text(), re.MULTILINE)
    }
    own = {path.stem for path in (ROOT / "examples").glob("*.py")} | {"ourddp", "torch", "__future__"}
    assert imported - own - sys.stdlib_module_names == {"matplotlib", "sklearn", "tqdm"}


def test_the_libraries_of_examples_are_declared():
    project = (ROOT / "pyproject.toml").read_text()
    declared = re.search(r"^libraries = \[(.*)\]", project, re.MULTILINE)
    assert declared is not None
    imported = {
        name
        for path in (ROOT / "examples" / "libraries").glob("*.py")
        for name in re.findall(r"^(?:import|from) (\w+)", path.read_text(), re.MULTILINE)
    }
    own = {path.stem for path in (ROOT / "examples").rglob("*.py")} | {"ourddp", "torch", "__future__"}
    packages = {name.removesuffix("-nightly") for name in re.findall(r'"([\w-]+)"', declared[1])}
    assert imported - own - sys.stdlib_module_names == packages


def test_a_source_distribution_has_all_files_of_a_checkout():
    if not (ROOT / ".git").exists() or shutil.which("git") is None:
        pytest.skip("this is not a git checkout, so the files that belong to it are unknown")
    names = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    code = """
        import setuptools
        from setuptools.command.egg_info import FileList
        from setuptools.command.sdist import sdist
        command = sdist(setuptools.Distribution({"packages": ["ourddp", "ourddp.example"], "script_name": "setup.py"}))
        command.ensure_finalized()
        command.filelist = FileList()
        command.add_defaults()
        command.read_template()
        print(*command.filelist.files, sep="\\n")
    """
    line = [sys.executable, "-c", textwrap.dedent(code)]
    packed = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=120, check=True).stdout.split("\n")
    assert sorted(set(names) - set(packed)) == []


def test_a_wheel_has_what_programs_in_cpp_need():
    code = """
        import setuptools
        distribution = setuptools.Distribution()
        distribution.parse_config_files()
        command = distribution.get_command_obj("build_py")
        command.ensure_finalized()
        print(*(name for *_, names in command.data_files for name in names), sep="\\n")
    """
    line = [sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=120, check=True)
    assert {"include/ourddp/ourddp.h", "share/cmake/ourddp/ourddpConfig.cmake"} <= set(done.stdout.split("\n"))


@pytest.mark.parametrize("engine", ["MPI", "CUDA"])
def test_info_says_whether_an_engine_is_built_in(engine):
    built = list((ROOT / "ourddp").glob(f"_{engine.lower()}.*.so"))
    assert _build_info.ENGINES[engine].startswith("on: " if built else "off")


def exported(library: Path) -> list[str]:
    """Return the demangled names that a library defines for others."""
    if shutil.which("nm") is None:
        pytest.skip("nm is missing")
    command = ["nm", "-D", "-C", "--defined-only", str(library)]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return [line.split(maxsplit=2)[2] for line in shown.splitlines()]


def test_the_libraries_export_only_names_of_their_own():
    # Others could replace the same functions in a program's other libraries, such as those of the standard library.
    own = re.compile(r"(vtable for |typeinfo for |typeinfo name for )?(ours|ourddp)::")
    names = exported(LIBRARY)
    assert "ourddp::detail::Wrapper::before_forward()" in names
    assert [name for name in names if not own.search(name)] == []
    assert exported(Path(_C.__file__)) == ["PyInit__C"]


def test_the_library_needs_no_python():
    if shutil.which("readelf") is None:
        pytest.skip("readelf is missing")
    shown = subprocess.run(["readelf", "-d", str(LIBRARY)], capture_output=True, text=True, check=True).stdout
    assert "libtorch_cpu" in shown
    assert not re.search(r"NEEDED.*python", shown)


def cuda_library() -> Path:
    """Return the library for CUDA; skip the test if the extension was built without it."""
    if not _build_info.ENGINES["CUDA"].startswith("on: "):
        pytest.skip(f"the extension was built without CUDA: {_build_info.ENGINES['CUDA']}")
    return next((ROOT / "ourddp").glob("_cuda.*.so"))


def test_the_cuda_library_exports_one_symbol_and_needs_no_cuda():
    if shutil.which("readelf") is None:
        pytest.skip("readelf is missing")
    library = cuda_library()
    assert exported(library) == ["ours_device_library"]
    needed = subprocess.run(["readelf", "-d", str(library)], capture_output=True, text=True, check=True).stdout
    assert "libstdc++" in needed
    assert not re.search(r"NEEDED.*(cuda|nccl|torch)", needed)


def test_the_cuda_library_can_be_loaded_without_a_driver(tmp_path):
    code = f"""
        import ctypes
        library = ctypes.CDLL({str(cuda_library())!r})
        library.ours_device_library.restype = ctypes.c_void_p
        assert library.ours_device_library(0) is None  # a version of the interface that does not exist
        assert library.ours_device_library({device_interface()}) is not None
    """
    result = run_python(code, tmp_path)
    assert result.returncode == 0, result.stderr


def device_interface() -> int:
    header = (ROOT / "csrc" / "device" / "device_library.h").read_text()
    return int(re.search(r"kDeviceInterface = (\d+);", header)[1])


def test_pyproject_has_the_version_of_the_package():
    pyproject = (ROOT / "pyproject.toml").read_text()
    assert f'version = "{ourddp.__version__}"' in pyproject


def test_the_type_stubs_have_the_names_of_the_extension():
    stubs = (ROOT / "ourddp" / "_C.pyi").read_text()
    declared = set(re.findall(r"^(?:class|def) (\w+)", stubs, re.MULTILINE))
    present = {name for name in vars(_C) if not name.startswith("__")}
    assert declared == present
