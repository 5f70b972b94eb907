"""Importing the package: what it refuses, what it loads, and what happens without a build."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from programs import run_python

from ourddp import _build_info, info

ROOT = Path(__file__).resolve().parents[2]


def test_another_torch_is_refused(tmp_path):
    code = """
        import torch
        torch.__version__ = "1.0.0"
        try:
            import ourddp
        except ImportError as error:
            print(error)
    """
    result = run_python(code, tmp_path)
    assert f"built for torch {_build_info.TORCH_VERSION}, but torch 1.0.0 is running" in result.stdout
    assert "pip install --no-build-isolation" in result.stdout


def test_another_build_of_the_same_torch_is_accepted(tmp_path):
    code = f"""
        import torch
        torch.__version__ = "{_build_info.TORCH_VERSION}+other"
        import ourddp
        print("imported")
    """
    result = run_python(code, tmp_path)
    assert result.stdout == "imported\n", result.stderr


def test_importing_the_package_loads_little_besides_torch(tmp_path):
    code = """
        import sys, torch, torch.distributed
        before = set(sys.modules)
        import ourddp
        print(*sorted(name for name in set(sys.modules) - before if not name.startswith("ourddp")))
    """
    line = [sys.executable, "-c", textwrap.dedent(code)]  # not a fork of one that has loaded them
    loaded = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=True).stdout.split()
    assert loaded
    # sympy and the others take longer to load than the whole package.
    assert not {"sympy", "torch._dynamo", "torch.distributed.tensor", "torch.distributed.fsdp"} & set(loaded)


@pytest.fixture
def unbuilt(tmp_path) -> Path:
    """Return a source folder without a build, at a path with a space."""
    package = tmp_path / "a checkout" / "ourddp"
    package.mkdir(parents=True)
    for file in (ROOT / "ourddp").glob("*.py"):
        if file.name != "_build_info.py":
            (package / file.name).write_text(file.read_text())
    return package.parent


def run_unbuilt(folder: Path, installed: Path | None, *command: str) -> subprocess.CompletedProcess[str]:
    """Run Python in a folder without a build; only ``installed`` has the package, too."""
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


def test_an_unbuilt_source_folder_uses_the_installed_package(unbuilt, tmp_path):
    installed = tmp_path / "site"
    installed.mkdir()
    (installed / "ourddp").symlink_to(ROOT / "ourddp")
    (unbuilt / "program.py").write_text(
        "import ourddp, ourddp.joining\nprint(ourddp.__file__, ourddp.joining.__file__)\n"
    )
    result = run_unbuilt(unbuilt, installed, "program")
    assert result.stdout.split() == [str(installed / "ourddp" / name) for name in ("__init__.py", "joining.py")]
    shown = run_unbuilt(unbuilt, installed, "ourddp", "options", "--markdown")
    assert shown.stdout.strip() == info.options_markdown(), shown.stderr


def test_importing_the_package_warns_of_nothing(tmp_path):
    line = [sys.executable, "-W", "error", "-c", "import ourddp"]
    around = {**os.environ, "PYTHONPATH": str(ROOT)}
    result = subprocess.run(line, cwd=tmp_path, env=around, capture_output=True, text=True, timeout=120, check=False)
    assert (result.returncode, result.stderr) == (0, "")
