"""The command-line tools: ``python -m ourddp info``, ``options`` and ``select``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from importlib.metadata import entry_points
from pathlib import Path

import pytest
import torch
from programs import environment, run_module, run_python

import ourddp
from ourddp import _C, _build_info, info
from ourddp.__main__ import main, program

TIMEOUT = 60


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


def test_info_describes_this_machine(monkeypatch):
    report = info.collect()
    assert list(report) == ["versions", "engines", "node", "backends", "options"]
    assert report["versions"]["torch"] == f"{torch.__version__} (built for {_build_info.TORCH_VERSION})"
    assert report["node"]["cores"].startswith(f"{len(os.sched_getaffinity(0))} usable")
    assert report["node"]["memfd"] == "yes"  # without it the tests of the backend could not run
    assert report["backends"]["ours"] == "for cpu, cuda"
    of_cuda = {"CUDA tensors", "CUDA library"} if _build_info.ENGINES["CUDA"].startswith("on: ") else set()
    assert set(report["engines"]) == {"shared memory", "CUDA", "NCCL", "MPI"} | of_cuda

    def refuse() -> None:
        raise RuntimeError("not allowed")

    monkeypatch.setattr(_C, "NodeProbe", refuse)
    assert info.collect()["node"]["memfd"].startswith("no: ")


def test_info_describes_the_cuda_engines():
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


def test_info_says_why_there_is_no_gpu(monkeypatch, tmp_path):
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
    result = run_python(code, tmp_path)
    assert result.returncode == 0, result.stderr


def test_commands_print(capsys):
    assert main(["info"]) == 0
    assert capsys.readouterr().out.startswith("versions\n  ourddp")
    assert main(["options"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(_C.option_table())
    assert main(["options", "--markdown"]) == 0
    assert capsys.readouterr().out.strip() == info.options_markdown()


def test_commands_print_json(capsys):
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


def test_version_option_prints_the_versions(capsys):
    with pytest.raises(SystemExit) as end:
        main(["--version"])
    assert end.value.code == 0
    assert capsys.readouterr().out == f"ourddp {ourddp.__version__}, torch {torch.__version__}\n"


def test_the_console_script_is_the_same_program():
    line = [Path(sys.executable).with_name("ourddp"), "select", "--json"]
    script = subprocess.run(line, env=environment(), capture_output=True, text=True, timeout=TIMEOUT, check=False)
    module = run_module("ourddp", "select", "--json")
    assert [script.returncode, module.returncode] == [0, 0], [script, module]
    assert script.stdout == module.stdout
    (entry,) = entry_points(group="console_scripts", name="ourddp")
    assert entry.load() is program


@pytest.mark.parametrize("line", [[], ["no-such-command"], ["info", "--no-such-argument"], ["bench", "--ranks", "two"]])
def test_a_line_that_is_not_understood_gives_2(line, capsys):
    with pytest.raises(SystemExit) as end:
        main(line)
    assert end.value.code == 2
    assert "usage: python -m ourddp" in capsys.readouterr().err


def test_commands_refuse_a_bad_option(tmp_path):
    code = "import sys; from ourddp.__main__ import main; sys.exit(main(['info']))"
    result = run_python(code, tmp_path, OURS_SPIN="loud")
    assert result.returncode == 1
    assert result.stderr.startswith("OURS_SPIN='loud' is not understood; accepted: ")
    assert "Traceback" not in result.stderr
