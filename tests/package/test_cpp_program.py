"""Programs in C++ that use the package without Python, built as users build them."""

from __future__ import annotations

import itertools
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import AbstractContextManager
from pathlib import Path

import mpirun
import pytest
import torch.distributed as dist
from example_programs import EXAMPLES, Run
from programs import environment, job, run_module, started, warm_python

PROJECTS = {"train": EXAMPLES / "cpp", "ways": Path(__file__).parent / "cpp_program"}
TIMEOUT = 100
BUILD_TIMEOUT = 600


@pytest.fixture(scope="module")
def cmake() -> str:
    beside = Path(sys.executable).with_name("cmake")
    if not beside.exists():
        pytest.skip("cmake is not installed in this environment: pip install cmake")
    return str(beside)


@pytest.fixture(scope="module")
def prefix() -> str:
    return run_module("ourddp", "cmake-prefix").stdout.strip()


@pytest.fixture(scope="module")
def built(cmake: str, prefix: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build both programs at the same time, each as its own project. Return the folder that they are in."""
    folder = tmp_path_factory.mktemp("built")
    builds = {}
    for name, source in PROJECTS.items():
        made = str(folder / name)
        # Without optimisations they compile faster, and most of the work is done in libraries.
        flags = [f"-DCMAKE_PREFIX_PATH={prefix}", "-DCMAKE_BUILD_TYPE=None"]
        flags += [f"-DCMAKE_RUNTIME_OUTPUT_DIRECTORY={folder / 'bin'}", "-DCMAKE_CXX_FLAGS=-Wall -Wextra -Werror"]
        subprocess.run([cmake, "-S", str(source), "-B", made, *flags], check=True, timeout=TIMEOUT)
        builds[name] = subprocess.Popen(
            [cmake, "--build", made], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
    outputs = {name: build.communicate(timeout=BUILD_TIMEOUT)[0] for name, build in builds.items()}
    for name, build in builds.items():
        assert build.returncode == 0, outputs[name]
    return folder / "bin"


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("digits") / "digits.csv"
    subprocess.run([sys.executable, str(EXAMPLES / "cpp" / "digits.py"), str(path)], check=True, timeout=TIMEOUT)
    return str(path)


class Jobs:
    """Starts ranks as torchrun does: all find one store, and each job is another attempt."""

    def __init__(self) -> None:
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._attempts = itertools.count()

    def start(self, commands: list[list[str]]) -> AbstractContextManager[list[subprocess.Popen[str]]]:
        """Start one rank for each of ``commands``; kill those that still run in the end."""
        attempt = {"TORCHELASTIC_RESTART_COUNT": str(next(self._attempts))}
        return started(commands, [variables | attempt for variables in job(len(commands), self._store)])

    def run(self, commands: list[list[str]]) -> list[subprocess.CompletedProcess[str]]:
        """Run ranks to their end."""
        with self.start(commands) as ranks:
            texts = [rank.communicate(timeout=TIMEOUT) for rank in ranks]
            return [
                subprocess.CompletedProcess(rank.args, rank.returncode, *text)
                for rank, text in zip(ranks, texts, strict=True)
            ]


@pytest.fixture(scope="module")
def jobs() -> Jobs:
    return Jobs()


def curve(output: str) -> list[tuple[float, float]]:
    """Return the loss and the accuracy on the held-out images of each epoch, as either program prints them."""
    lines = re.findall(r"^epoch +\d+ +loss ([\d.]+).* accuracy +([\d.]+)%", output, re.MULTILINE)
    return [(float(loss), float(accuracy)) for loss, accuracy in lines]


def test_the_example_trains_as_the_one_in_python_does(built: Path, digits: str, run_example: Run) -> None:
    torchrun = [warm_python(), "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=4", "--no-python"]
    command = [*torchrun, str(built / "train"), digits, "5"]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=TIMEOUT, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("\nthe parameters of all 4 ranks are equal, bit by bit\n")
    found, expected = curve(done.stdout), curve(run_example("train.py", 4, "--epochs", "5"))
    assert len(found) == 5
    assert found[-1][1] > 95
    for (loss, accuracy), (loss_in_python, accuracy_in_python) in zip(found, expected, strict=True):
        # They are equal where both compute with as many threads.
        assert loss == pytest.approx(loss_in_python, rel=0.02, abs=0.002)
        assert accuracy == pytest.approx(accuracy_in_python, abs=1)


def test_mpirun_starts_the_example(built: Path, digits: str) -> None:
    if mpirun.find("mpirun") is None:
        pytest.skip("mpirun is missing")
    done = mpirun.run(2, [str(built / "train"), digits, "1"], mpirun.environment())
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("\nthe parameters of all 2 ranks are equal, bit by bit\n")


def test_other_ways_of_training(built: Path, jobs: Jobs) -> None:
    for rank, done in enumerate(jobs.run([[str(built / "ways")]] * 2)):
        assert (done.returncode, done.stdout) == (0, f"rank {rank} of torchrun: all is well\n"), done.stderr


def test_models_that_differ_are_named_on_all_ranks(built: Path, digits: str, jobs: Jobs) -> None:
    command = [str(built / "train"), digits, "1"]
    for done in jobs.run([command, command, [*command, "64"], command]):
        assert done.returncode == 1
        assert done.stderr.startswith(
            "DDP expects same model across all ranks, but parameter 4 (7.weight) is float32 [128, 1024] on rank 0, "
            "which appears not to match float32 [64, 1024] on rank 2."
        )


def test_calls_that_differ_are_named_on_all_ranks(built: Path, digits: str, jobs: Jobs) -> None:
    command = [str(built / "train"), digits]
    for done in jobs.run([[*command, "2"], [*command, "1"]]):
        assert done.returncode == 1
        assert re.search(r"called different collectives: rank 0 .* called all_reduce number .*; rank 1 ", done.stderr)


def test_a_killed_rank_is_named_and_the_others_end(built: Path, digits: str, jobs: Jobs) -> None:
    with jobs.start([[str(built / "train"), digits, "1000000"]] * 4) as ranks:
        assert ranks[0].stdout is not None
        assert ranks[0].stdout.readline().startswith("epoch   1")
        os.kill(ranks[2].pid, signal.SIGKILL)
        began = time.monotonic()
        errors = {rank: ranks[rank].communicate(timeout=TIMEOUT)[1] for rank in (0, 1, 3)}
        assert time.monotonic() - began < 10
        for rank, error in errors.items():
            assert ranks[rank].returncode == 1
            assert re.search(rf"rank 2 \(host \S+, pid {ranks[2].pid}\) died during \w+ number", error)


def test_an_incomplete_environment_is_refused(built: Path, digits: str) -> None:
    command = [str(built / "train"), digits]
    for variables, reason in (
        ({"RANK": "0"}, "RANK is set, but not WORLD_SIZE: set both, or neither for a job of this process alone"),
        (
            {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "70000"},
            "MASTER_PORT is 70000: ports end at 65535",
        ),
    ):
        env = environment(**variables)
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=TIMEOUT, check=False)
        assert (done.returncode, done.stderr.splitlines()) == (1, [reason])


def test_another_torch_is_refused(cmake: str, prefix: str, tmp_path: Path) -> None:
    version = tmp_path / "torch" / "share" / "cmake" / "Torch" / "TorchConfigVersion.cmake"
    version.parent.mkdir(parents=True)
    version.write_text('set(PACKAGE_VERSION "1.0.0+cpu")\n')
    flags = [f"-DCMAKE_PREFIX_PATH={prefix}", f"-Dourddp_TORCH={tmp_path / 'torch'}"]
    command = [cmake, "-S", str(EXAMPLES / "cpp"), "-B", str(tmp_path / "build"), *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, check=False)
    assert done.returncode != 0
    said = " ".join(done.stderr.split())
    assert re.search(r"ourddp was built for torch [\d.]+, but torch 1\.0\.0 is in", said), said
