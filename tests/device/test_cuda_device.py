"""The device of CUDA, and NCCL: the contract of devices and what is their own, by a C++ program. Needs GPU and nvcc."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from ourddp import _build_info

ROOT = Path(__file__).resolve().parents[2]

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(2400)]

MAKE = ["make", "-C", str(ROOT), "-f", "tests/cpp/Makefile"]
# Where the NCCL is that torch brings.
NCCL = Path(torch.__file__).resolve().parent.parent / "nvidia" / "nccl" / "lib"


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")}
    environment["LD_LIBRARY_PATH"] = f"{NCCL}:{environment.get('LD_LIBRARY_PATH', '')}"
    result = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=1100
    )
    print(result.stdout[-8000:])
    return result


@pytest.fixture(scope="module")
def nvcc() -> str:
    """Build the program, and return the path of the compiler for it; skip without one, or without a GPU."""
    if not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device")
    if not _build_info.ENGINES["CUDA"].startswith("on: "):
        pytest.skip(f"the extension was built without CUDA: {_build_info.ENGINES['CUDA']}")
    with pytest.MonkeyPatch.context() as context:
        context.syspath_prepend(str(ROOT))
        import setup_cuda

        path = setup_cuda.find_nvcc()
    assert _run([*MAKE, "-j", str(os.cpu_count()), "cuda_tests", f"NVCC={path}"]).returncode == 0
    return path


def test_the_cuda_device_keeps_the_contract(nvcc):
    result = _run([*MAKE, "cuda", f"NVCC={nvcc}"])
    assert result.returncode == 0
    assert re.search(r"^\d+ passed, 0 failed$", result.stdout, re.MULTILINE)
    if "skipped: " in result.stdout:
        assert not (NCCL / "libnccl.so.2").is_file()
        pytest.skip("all but NCCL, which the program does not find")


@pytest.mark.parametrize("check", ["memcheck", "racecheck", "synccheck"])
def test_compute_sanitizer_finds_nothing(nvcc, check):
    sanitizer = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path=Path(nvcc).parent)
    if sanitizer is None:
        pytest.skip("there is no compute-sanitizer on PATH or beside nvcc")
    # Not the tests' own verdict, as some of them are given less time than they need here.
    result = _run([*MAKE, "cuda_sanitize", f"NVCC={nvcc}", f"SANITIZER={sanitizer}", f"CHECK={check}"])
    assert re.search(r"^[1-9]\d* passed, ", result.stdout, re.MULTILINE)
    summaries = re.findall(r"SUMMARY: (\d+) (?:error|hazard)", result.stdout)
    assert len(summaries) == result.stdout.count("SUMMARY: ") > 0
    assert set(summaries) == {"0"}
