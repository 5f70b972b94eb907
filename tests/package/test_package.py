"""The package: its options, its command-line tools, and what it refuses."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

import ourddp
from ourddp import _C, _build_info, info
from ourddp.__main__ import main

ROOT = Path(__file__).resolve().parents[2]


def python(code: str, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """Run ``code`` in a fresh interpreter that finds the package in this checkout."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **env}
    command = [sys.executable, "-c", textwrap.dedent(code)]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=120, check=False)


# --- options ---------------------------------------------------------------------------------------------------------


def test_options_have_defaults():
    values = _C.parse_options({})
    assert values == {row["name"]: row["default"] for row in _C.option_table()}
    assert values["OURS_YIELD_US"] == "500"
    assert values["OURS_SPIN"] == "auto"


@pytest.mark.parametrize(
    ("name", "text", "shown"),
    [
        ("OURS_YIELD_US", "0", "0"),
        ("OURS_SPIN", "1", "1"),
        ("OURS_CHUNK_BYTES", "4M", str(4 << 20)),
        ("OURS_SMALL_BYTES", "65536", "65536"),
        ("OURS_COMM_THREAD_AFFINITY", "0-2,7", "0,1,2,7"),
        ("OURS_COMM_THREAD_AFFINITY", "", ""),
        ("OURS_COMM_NICE", "-20", "-20"),
        ("OURS_INLINE", "0", "0"),
        ("OURS_BLOCKING_WAIT", "1", "1"),
        ("OURS_NODE_ID", "left rack", "left rack"),
        ("OURS_INTERFACE", "^docker0,10.0.0.0/8", "^docker0,10.0.0.0/8"),
        ("OURS_PORT_RANGE", "20000-20999", "20000-20999"),
        ("OURS_PORT_RANGE", "", ""),
        ("OURS_TCP_STREAMS", "4", "4"),
        ("OURS_TCP_CONGESTION", "reno", "reno"),
        ("OURS_INTERNODE", "gloo", "gloo"),
        ("OURS_INTERNODE", "My_Backend-2", "my_backend-2"),
    ],
)
def test_options_are_parsed(name, text, shown):
    assert _C.parse_options({name: text})[name] == shown


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("OURS_YIELD_US", ""),
        ("OURS_YIELD_US", "50us"),
        ("OURS_INTERNODE", ""),
        ("OURS_INTERNODE", "gloo,tcp"),
        ("OURS_YIELD_US", "-1"),
        ("OURS_YIELD_US", "1000001"),
        ("OURS_SPIN", "yes"),
        ("OURS_CHUNK_BYTES", "4m"),
        ("OURS_CHUNK_BYTES", "M"),
        ("OURS_SMALL_BYTES", "99999999999999G"),
        ("OURS_CHUNK_BYTES", "100G"),
        ("OURS_CHUNK_BYTES", "1025M"),
        ("OURS_COMM_THREAD_AFFINITY", "3-1"),
        ("OURS_COMM_THREAD_AFFINITY", "1,"),
        ("OURS_COMM_THREAD_AFFINITY", "all"),
        ("OURS_COMM_NICE", "20"),
        ("OURS_COMM_NICE", "-21"),
        ("OURS_INLINE", "true"),
        ("OURS_SPIN", "Auto"),
        ("OURS_PORT_RANGE", "20000"),
        ("OURS_PORT_RANGE", "0-9"),
        ("OURS_PORT_RANGE", "20999-20000"),
        ("OURS_PORT_RANGE", "20000-65536"),
        ("OURS_TCP_STREAMS", "17"),
    ],
)
def test_bad_options_are_refused(name, text):
    accepted = next(row["accepted"] for row in _C.option_table() if row["name"] == name)
    with pytest.raises(ValueError, match=f"{name}='{re.escape(text)}' is not understood") as error:
        _C.parse_options({name: text})
    assert accepted in str(error.value)


def test_misspelt_variables_are_told_with_what_may_have_been_meant():
    strays = ["OURS_SPINN", "OURS_CHUNKBYTES", "HOME", "OURS_SPIN", "OURS_WITH_MPI", "OURS_WERROR", "MY_OURS_SPIN"]
    complaints = _C.stray_variables(strays)
    assert len(complaints) == 2
    assert "OURS_SPINN is set, but nothing reads it. Did you mean OURS_SPIN?" in complaints[0]
    assert "Did you mean OURS_CHUNK_BYTES?" in complaints[1]


def test_a_group_warns_of_misspelt_variables_once(tmp_path):
    script = "import torch.distributed as dist, ourddp\nourddp.init()\ndist.new_group()\n"
    result = python(script, tmp_path, OURS_SPINN="1")
    assert result.returncode == 0, result.stderr
    assert result.stderr.count("OURS_SPINN is set, but nothing reads it. Did you mean OURS_SPIN?") == 1


def test_options_come_from_the_environment(tmp_path):
    result = python("from ourddp import _C; print(_C.option_values()['OURS_YIELD_US'])", tmp_path, OURS_YIELD_US="7")
    assert result.stdout.strip() == "7", result.stderr


# --- command-line tools ----------------------------------------------------------------------------------------------


def test_info_is_laid_out_in_sections():
    report = {"versions": {"ourddp": "1", "torch": "2"}, "node": {"boot id": "yes"}, "options": {}}
    expected = """\
    versions
      ourddp  1
      torch   2
    node
      boot id  yes
    options
      all at their defaults"""
    assert info.render(report) == textwrap.dedent(expected)


def test_info_tells_the_truth(monkeypatch):
    report = info.collect()
    assert list(report) == ["versions", "engines", "node", "backends", "options"]
    assert report["versions"]["torch"] == f"{torch.__version__} (built for {_build_info.TORCH_VERSION})"
    assert report["node"]["cores"].startswith(f"{len(os.sched_getaffinity(0))} usable")
    assert report["node"]["memfd"] == "yes"  # the tests of the backend cannot run without
    assert report["backends"]["ours"] == "for cpu, cuda"
    of_cuda = {"CUDA tensors", "CUDA library"} if _build_info.ENGINES["CUDA"].startswith("on: ") else set()
    assert set(report["engines"]) == {"shared memory", "CUDA", "NCCL", "MPI"} | of_cuda

    def refuse(*_: object) -> int:
        raise OSError("not allowed")

    monkeypatch.setattr(os, "memfd_create", refuse)
    assert info.collect()["node"]["memfd"].startswith("no: ")


def test_info_says_what_there_is_for_cuda():
    facts = {
        "obstacle": "",
        "library": "CUDA 13.0, sm_90",
        "devices": ["NVIDIA H200", "NVIDIA H200"],
        "device_obstacle": "",
        "vendor_version": "NCCL 2.30.7",
        "vendor_obstacle": "",
    }
    assert info.cuda(facts) == {
        "CUDA": "on: CUDA 13.0, sm_90; 2 devices: NVIDIA H200",
        "NCCL": "on: NCCL 2.30.7, where each rank has a device of its own",
        "CUDA tensors": "by nccl where each rank has a device of its own (up to 2 ranks here), else by ipc on one "
        "node, where the devices reach each other, else by staging",
    }
    assert info.cuda(facts, "ipc")["CUDA tensors"] == "by ipc, for which OURS_DEVICE_ENGINE asks"
    without = info.cuda({**facts, "vendor_obstacle": "libnccl.so.2 is missing"})
    assert without["CUDA tensors"].startswith("by ipc on one node")
    alone = {**facts, "devices": [], "vendor_obstacle": "libnccl.so.2 is missing"}
    assert info.cuda(alone) == {
        "CUDA": "on: CUDA 13.0, sm_90; no GPU here",
        "NCCL": "off: libnccl.so.2 is missing",
        "CUDA tensors": "none: there is no GPU here",
    }
    assert info.cuda({**facts, "obstacle": "it cannot be loaded"}) == {
        "CUDA": "off: it cannot be loaded",
        "NCCL": "off: it needs CUDA",
    }


def test_info_says_that_there_is_no_gpu_and_why(monkeypatch, tmp_path):
    assert info.gpus(["NVIDIA H200", "NVIDIA H200"], "") == "NVIDIA H200, NVIDIA H200"
    assert info.gpus(2, "") == "2"
    monkeypatch.setattr(info, "DRIVER", tmp_path / "version")
    assert info.gpus(0, "no driver") == "no GPU here: no NVIDIA driver is loaded"
    (tmp_path / "version").touch()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert info.gpus([], "").startswith("no GPU here: CUDA_VISIBLE_DEVICES='' hides")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert info.gpus([], "it is too old") == "no GPU here: it is too old"
    assert info.gpus(0, "") == "no GPU here: the driver shows none"
    if not torch.cuda.is_available():
        assert info.node()["GPUs"].startswith("no GPU here: ")


@pytest.mark.gpu
def test_info_opens_no_device(tmp_path):
    if not torch.cuda.is_available():
        pytest.skip("torch finds no CUDA device here")
    code = """
        import ctypes
        from ourddp import _C
        assert _C.device_facts("cuda")["devices"]
        driver = ctypes.CDLL("libcuda.so.1")
        device, flags, active = ctypes.c_int(), ctypes.c_uint(), ctypes.c_int(-1)
        assert driver.cuInit(0) == 0
        assert driver.cuDeviceGet(ctypes.byref(device), 0) == 0
        assert driver.cuDevicePrimaryCtxGetState(device, ctypes.byref(flags), ctypes.byref(active)) == 0
        assert active.value == 0
    """
    result = python(code, tmp_path)
    assert result.returncode == 0, result.stderr


def test_commands_print(capsys):
    assert main(["info"]) == 0
    assert capsys.readouterr().out.startswith("versions\n  ourddp")
    assert main(["options"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(_C.option_table())
    assert main(["options", "--markdown"]) == 0
    assert capsys.readouterr().out.strip() == info.options_markdown()


def test_commands_print_for_programs(capsys):
    assert main(["info", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert list(report) == ["versions", "engines", "node", "backends", "options"]
    assert report["versions"]["ourddp"] == ourddp.__version__
    assert main(["options", "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert {name: row["value"] for name, row in rows.items()} == _C.option_values()
    assert rows["OURS_SPIN"]["default"] == "auto"
    assert main(["select", "--json"]) == 0
    table = json.loads(capsys.readouterr().out)
    assert table[-1]["rule"] == "all direct"
    assert all(row["why"] for row in table)


def test_the_version_is_told(capsys):
    with pytest.raises(SystemExit) as end:
        main(["--version"])
    assert end.value.code == 0
    assert capsys.readouterr().out == f"ourddp {ourddp.__version__}, torch {torch.__version__}\n"


def test_commands_refuse_a_bad_option(tmp_path):
    code = "import sys; from ourddp.__main__ import main; sys.exit(main(['info']))"
    result = python(code, tmp_path, OURS_SPIN="loud")
    assert result.returncode == 1
    assert result.stderr.startswith("OURS_SPIN='loud' is not understood; accepted: ")
    assert "Traceback" not in result.stderr


# --- import and build ------------------------------------------------------------------------------------------------


def test_another_torch_is_refused(tmp_path):
    code = """
        import torch
        torch.__version__ = "1.0.0"
        try:
            import ourddp
        except ImportError as error:
            print(error)
    """
    result = python(code, tmp_path)
    assert f"built for torch {_build_info.TORCH_VERSION}, but torch 1.0.0 is running" in result.stdout
    assert "pip install --no-build-isolation" in result.stdout


def test_another_build_of_the_same_torch_is_accepted(tmp_path):
    code = f"""
        import torch
        torch.__version__ = "{_build_info.TORCH_VERSION}+other"
        import ourddp
        print("imported")
    """
    result = python(code, tmp_path)
    assert result.stdout == "imported\n", result.stderr


def test_importing_the_package_loads_little_besides_torch(tmp_path):
    code = """
        import sys, torch, torch.distributed
        before = set(sys.modules)
        import ourddp
        print(*sorted(name for name in set(sys.modules) - before if not name.startswith("ourddp")))
    """
    loaded = python(code, tmp_path).stdout.split()
    # sympy and the like take longer than all of the package.
    assert not {"sympy", "torch._dynamo", "torch.distributed.tensor", "torch.distributed.fsdp"} & set(loaded)


@pytest.fixture
def unbuilt(tmp_path) -> Path:
    """Return a source folder in which nothing has been built, in a path with a space."""
    package = tmp_path / "a checkout" / "ourddp"
    package.mkdir(parents=True)
    for file in (ROOT / "ourddp").glob("*.py"):
        if file.name != "_build_info.py":
            (package / file.name).write_text(file.read_text())
    return package.parent


def run_unbuilt(folder: Path, installed: Path | None, *command: str) -> subprocess.CompletedProcess[str]:
    """Run Python in an unbuilt folder, ``installed`` being the only other place that has the package."""
    code = """
        import runpy, sys
        sys.meta_path = [finder for finder in sys.meta_path if "__editable__" not in repr(finder)]
        sys.argv = sys.argv[1:]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    """
    line = [sys.executable, "-c", textwrap.dedent(code), *command]
    around = {**os.environ, "PYTHONPATH": str(installed or "")}
    return subprocess.run(line, cwd=folder, env=around, capture_output=True, text=True, timeout=120, check=False)


def test_an_unbuilt_package_says_how_to_build_it(unbuilt):
    result = run_unbuilt(unbuilt, None, "ourddp", "info")
    assert result.returncode == 1
    assert f"ourddp has not been built in {unbuilt}, and is not installed elsewhere: run 'make build'" in result.stderr


def test_an_unbuilt_source_folder_hands_over_to_the_installed_package(unbuilt, tmp_path):
    installed = tmp_path / "site"
    installed.mkdir()
    (installed / "ourddp").symlink_to(ROOT / "ourddp")
    (unbuilt / "program.py").write_text(
        "import ourddp, ourddp.launch\nprint(ourddp.__file__, ourddp.launch.__file__)\n"
    )
    result = run_unbuilt(unbuilt, installed, "program")
    assert result.stdout.split() == [str(installed / "ourddp" / name) for name in ("__init__.py", "launch.py")]
    shown = run_unbuilt(unbuilt, installed, "ourddp", "options", "--markdown")
    assert shown.stdout.strip() == info.options_markdown(), shown.stderr


def test_what_was_built_names_no_folder_of_this_machine():
    # What was built in place finds MPI where it was found here; a wheel does not (tests/package/test_build.py).
    for file in [_C.__file__, _build_info.__file__]:
        content = Path(file).read_bytes()
        for folder in (ROOT, Path(torch.__file__).parent.parent):
            assert f"{folder}/".encode() not in content, file


def test_importing_the_package_warns_of_nothing(tmp_path):
    line = [sys.executable, "-W", "error", "-c", "import ourddp"]
    around = {**os.environ, "PYTHONPATH": str(ROOT)}
    result = subprocess.run(line, cwd=tmp_path, env=around, capture_output=True, text=True, timeout=120, check=False)
    assert (result.returncode, result.stderr) == (0, "")


def test_what_the_package_needs_is_declared():
    project = (ROOT / "pyproject.toml").read_text()
    assert re.search(r'^examples = \["scikit-learn", "tqdm"\]', project, re.MULTILINE)
    imported = {
        name
        for path in (ROOT / "examples").glob("*.py")
        for name in re.findall(r"^\s*(?:import|from) (\w+)", path.read_text(), re.MULTILINE)
    }
    own = {path.stem for path in (ROOT / "examples").glob("*.py")} | {"ourddp", "torch", "__future__"}
    assert imported - own - sys.stdlib_module_names == {"sklearn", "tqdm"}


def test_a_source_distribution_has_all_that_a_checkout_has():
    if not (ROOT / ".git").exists() or shutil.which("git") is None:
        pytest.skip("what belongs to a checkout is known to git, and this is none")
    names = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    code = """
        import setuptools
        from setuptools.command.egg_info import FileList
        from setuptools.command.sdist import sdist
        command = sdist(setuptools.Distribution({"packages": ["ourddp"], "script_name": "setup.py"}))
        command.ensure_finalized()
        command.filelist = FileList()
        command.add_defaults()
        command.read_template()
        print(*command.filelist.files, sep="\\n")
    """
    line = [sys.executable, "-c", textwrap.dedent(code)]
    packed = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=120, check=True).stdout.split("\n")
    assert sorted(set(names) - set(packed)) == []


def test_info_says_whether_mpi_is_built_in():
    built = list((ROOT / "ourddp").glob("_mpi.*.so"))
    assert _build_info.ENGINES["MPI"].startswith("on: " if built else "off")


def test_info_says_whether_cuda_is_built_in():
    built = list((ROOT / "ourddp").glob("_cuda.*.so"))
    assert _build_info.ENGINES["CUDA"].startswith("on: " if built else "off")


def cuda_library() -> Path:
    """Return the library for CUDA; skip where this copy was built without."""
    if not _build_info.ENGINES["CUDA"].startswith("on: "):
        pytest.skip(f"the extension was built without CUDA: {_build_info.ENGINES['CUDA']}")
    return next((ROOT / "ourddp").glob("_cuda.*.so"))


def test_the_cuda_library_shows_one_symbol_and_needs_no_cuda():
    if shutil.which("nm") is None or shutil.which("readelf") is None:
        pytest.skip("nm and readelf are missing")
    library = str(cuda_library())
    shown = subprocess.run(["nm", "-D", "--defined-only", library], capture_output=True, text=True, check=True)
    assert [line.split()[-1] for line in shown.stdout.splitlines()] == ["ours_device_library"]
    needed = subprocess.run(["readelf", "-d", library], capture_output=True, text=True, check=True).stdout
    assert "libstdc++" in needed
    assert not re.search(r"NEEDED.*(cuda|nccl|torch)", needed)


def test_the_cuda_library_is_loaded_where_there_is_no_driver(tmp_path):
    code = f"""
        import ctypes
        library = ctypes.CDLL({str(cuda_library())!r})
        library.ours_device_library.restype = ctypes.c_void_p
        assert library.ours_device_library(0) is None  # of another interface
        assert library.ours_device_library({device_interface()}) is not None
    """
    result = python(code, tmp_path)
    assert result.returncode == 0, result.stderr


def device_interface() -> int:
    header = (ROOT / "csrc" / "device" / "device_library.h").read_text()
    return int(re.search(r"kDeviceInterface = (\d+);", header)[1])


def all_reduce_on_the_cpu(rank: int, world: int) -> None:
    tensor = torch.full((1000,), float(rank + 1))
    dist.all_reduce(tensor)
    assert torch.equal(tensor, torch.full((1000,), world * (world + 1) / 2))


def test_a_build_with_cuda_works_without_a_gpu():
    cuda_library()
    run_ranks(2, all_reduce_on_the_cpu)


def test_the_version_is_the_same_everywhere():
    pyproject = (ROOT / "pyproject.toml").read_text()
    assert f'version = "{ourddp.__version__}"' in pyproject


def test_type_stubs_name_what_the_extension_has():
    stubs = (ROOT / "ourddp" / "_C.pyi").read_text()
    declared = set(re.findall(r"^(?:class|def) (\w+)", stubs, re.MULTILINE))
    present = {name for name in vars(_C) if not name.startswith("__")}
    assert declared == present
