"""Finds this process's place in its job from the environment that torchrun, mpirun, mpiexec or srun gave it."""

from __future__ import annotations

import datetime
import os
import re
import zlib
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

FIRST_PORT, PORTS = 20000, 12768  # below Linux's ephemeral ports, which any program may be using
SPECIAL_STEPS = (1 << 32) - 16  # the first step number of batch scripts and logins, which srun does not start as tasks
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Launch:
    """A process's place in its job."""

    launcher: str  #: "torchrun", "Open MPI", "Hydra", "Slurm", or "none" if there was no launcher
    rank: int  #: 0 to world_size - 1
    world_size: int  #: processes of the job
    local_rank: int  #: 0 to local_world_size - 1
    local_world_size: int  #: processes of the job on this node
    master_addr: str  #: where rank 0 can be reached
    master_port: int  #: where rank 0 listens; 0 if there was no launcher


def init(backend: str | None = "ours", *, timeout: datetime.timedelta | None = None, **options: Any) -> Launch:
    """Join the job that torchrun, mpirun, mpiexec or srun started this process in, and return its place there.

    ``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK``, ``LOCAL_WORLD_SIZE``, ``MASTER_ADDR`` and ``MASTER_PORT`` are set as
    torchrun sets them, unless they are set already. A process that was started without a launcher becomes a job of one
    rank; its environment is left alone, because its child processes do not belong to that job. ``timeout`` and other
    keyword arguments are those of ``torch.distributed.init_process_group``.

    Raises RuntimeError if the group exists already, and ValueError, which names the variable to set, if the environment
    is incomplete or contradicts itself.
    """
    if dist.is_initialized():
        raise RuntimeError(
            "the default process group exists already: call ourddp.init() once, and not init_process_group()"
        )
    launch = find(os.environ)
    if launch.launcher != "none":
        export(launch, os.environ)
    if timeout is not None:
        options["timeout"] = timeout
    if launch.launcher == "none":
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, **options)
    else:
        dist.init_process_group(backend, rank=launch.rank, world_size=launch.world_size, **options)
    return launch


def find(environment: Mapping[str, str]) -> Launch:
    """Return the place that the environment describes; ValueError if something is missing."""
    if "RANK" in environment and "WORLD_SIZE" in environment:
        return _torchrun(environment)
    if "OMPI_COMM_WORLD_RANK" in environment:
        return _open_mpi(environment)
    of_slurm = "SLURM_PROCID" in environment and _number(environment, "SLURM_STEP_ID", SPECIAL_STEPS) < SPECIAL_STEPS
    # srun --mpi=pmi2 sets PMI_* as mpiexec does, but no numbers on the node.
    if "PMI_RANK" in environment and ("MPI_LOCALNRANKS" in environment or not of_slurm):
        return _hydra(environment)
    if of_slurm:
        return _slurm(environment)
    # Some environments set WORLD_SIZE=1 for a job of one.
    for one, other in (("RANK", "WORLD_SIZE"), ("WORLD_SIZE", "RANK")):
        if one in environment and (one == "RANK" or _number(environment, one) != 1):
            raise ValueError(f"{one} is set, but not {other}: set both, or neither for a job of this process alone")
    return Launch("none", 0, 1, 0, 1, LOOPBACK, 0)


def export(launch: Launch, environment: MutableMapping[str, str]) -> None:
    """Set those of torchrun's variables that are not set."""
    environment.setdefault("RANK", str(launch.rank))
    environment.setdefault("WORLD_SIZE", str(launch.world_size))
    environment.setdefault("LOCAL_RANK", str(launch.local_rank))
    environment.setdefault("LOCAL_WORLD_SIZE", str(launch.local_world_size))
    environment.setdefault("MASTER_ADDR", launch.master_addr)
    environment.setdefault("MASTER_PORT", str(launch.master_port))


def _torchrun(environment: Mapping[str, str]) -> Launch:
    rank, size = _number(environment, "RANK"), _number(environment, "WORLD_SIZE")
    local_rank = _number(environment, "LOCAL_RANK", 0)
    local_size = _number(environment, "LOCAL_WORLD_SIZE", 1)
    for name, number, count in (("RANK", rank, size), ("LOCAL_RANK", local_rank, local_size)):
        total = name.replace("RANK", "WORLD_SIZE")
        if number >= count and name in environment and total in environment:
            raise ValueError(f"{name} is {number} and {total} is {count}: ranks are numbered from 0 to {count - 1}")
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if not environment.get(name):
            raise ValueError(f"RANK is set, but not {name}: set it alike in all ranks, or start them with torchrun")
    address, port = environment["MASTER_ADDR"], _number(environment, "MASTER_PORT")
    return Launch("torchrun", rank, size, local_rank, local_size, address, port)


def _open_mpi(environment: Mapping[str, str]) -> Launch:
    size = _number(environment, "OMPI_COMM_WORLD_SIZE")
    local_size = _number(environment, "OMPI_COMM_WORLD_LOCAL_SIZE")
    # PMIx's name of the job has mpirun's host and process; Open MPI 4 has a number.
    job = environment.get("PMIX_NAMESPACE") or environment.get("OMPI_MCA_ess_base_jobid") or _parent()
    return Launch(
        "Open MPI",
        _number(environment, "OMPI_COMM_WORLD_RANK"),
        size,
        _number(environment, "OMPI_COMM_WORLD_LOCAL_RANK"),
        local_size,
        _master_addr(environment, size == local_size, "mpirun -x MASTER_ADDR=<host of rank 0>"),
        _master_port(environment, job),
    )


def _hydra(environment: Mapping[str, str]) -> Launch:
    # The mpiexec of MPICH and that of Intel MPI both tell a process its number on the node.
    size = _number(environment, "PMI_SIZE")
    local_size = _number(environment, "MPI_LOCALNRANKS")
    one_node = size == local_size
    if not one_node and not environment.get("MASTER_PORT"):
        raise ValueError(
            "mpiexec does not tell its processes which job they belong to, so no port can be derived from that: "
            "set one with mpiexec -genv MASTER_PORT <port>"
        )
    return Launch(
        "Hydra",
        _number(environment, "PMI_RANK"),
        size,
        _number(environment, "MPI_LOCALRANKID"),
        local_size,
        _master_addr(environment, one_node, "mpiexec -genv MASTER_ADDR <host of rank 0>"),
        _master_port(environment, _parent()),
    )


def _slurm(environment: Mapping[str, str]) -> Launch:
    size = _number(environment, "SLURM_STEP_NUM_TASKS", _number(environment, "SLURM_NTASKS", 1))
    node = _number(environment, "SLURM_NODEID", 0)
    tasks = environment.get("SLURM_STEP_TASKS_PER_NODE") or environment.get("SLURM_TASKS_PER_NODE") or str(size)
    address = environment.get("MASTER_ADDR")
    if not address:
        nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST")
        if not nodes:
            raise ValueError("SLURM_STEP_NODELIST is not set: set MASTER_ADDR to the host of rank 0")
        address = first_host(nodes)
    return Launch(
        "Slurm",
        _number(environment, "SLURM_PROCID"),
        size,
        _number(environment, "SLURM_LOCALID"),
        tasks_of_node(tasks, node),
        address,
        _master_port(environment, f"{environment.get('SLURM_JOB_ID')}.{environment.get('SLURM_STEP_ID')}"),
    )


def first_host(nodes: str) -> str:
    """Return the first host of a list as Slurm writes it: ``"rack[1,4]-node[007-012,3],login1"`` has rack1-node007."""
    depth, end = 0, len(nodes)
    for place, letter in enumerate(nodes):
        depth += (letter == "[") - (letter == "]")
        if letter == "," and depth == 0:
            end = place
            break
    host = re.sub(r"\[([^],-]+)[^]]*\]", r"\1", nodes[:end])
    if not host or depth != 0:
        raise ValueError(f"{nodes!r} is not a Slurm host list: set MASTER_ADDR to the host of rank 0")
    return host


def tasks_of_node(tasks: str, node: int) -> int:
    """Return the number of tasks of node number ``node`` in Slurm's ``"4(x2),3"``: 4, 4 and 3."""
    first = 0
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", tasks):
        first += int(times or 1)
        if node < first:
            return int(count)
    raise ValueError(f"node {node} is not in SLURM_STEP_TASKS_PER_NODE={tasks!r}")


def _number(environment: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environment.get(name)
    if text is None and default is not None:
        return default
    try:
        number = int(text or "")
    except ValueError:
        number = -1
    if number < 0:
        state = "not set" if text is None else f"{text!r}, which is not a non-negative integer"
        raise ValueError(f"{name} is {state}: start the ranks with torchrun, mpirun, mpiexec or srun")
    return number


def _master_addr(environment: Mapping[str, str], one_node: bool, how: str) -> str:
    address = environment.get("MASTER_ADDR")
    if address:
        return address
    if not one_node:
        raise ValueError(f"the job has several nodes, and MPI does not tell where rank 0 is: start it with {how}")
    return LOOPBACK


def _master_port(environment: Mapping[str, str], job: str) -> int:
    """Return MASTER_PORT, or a port that all ranks of the job compute alike and other jobs hardly ever do."""
    if environment.get("MASTER_PORT"):
        return _number(environment, "MASTER_PORT")
    return FIRST_PORT + zlib.crc32(job.encode()) % PORTS


def _parent() -> str:
    # The launcher's process on this node, which is the parent of all ranks there.
    return str(os.getppid())
