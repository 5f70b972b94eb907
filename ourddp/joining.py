"""Finds this process's place in its job from the environment that torchrun, mpirun, mpiexec or srun gave it."""

from __future__ import annotations

import datetime
import os
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from ourddp import _C


@dataclass(frozen=True)
class Launch:
    """A process's place in its job.

    Attributes:
        launcher: "torchrun", "Open MPI", "Hydra", "Slurm", or "none" if there was no launcher.
        rank: 0 to ``world_size`` - 1.
        world_size: Processes of the job.
        local_rank: 0 to ``local_world_size`` - 1.
        local_world_size: Processes of the job on this node.
        master_addr: Where rank 0 can be reached.
        master_port: Where rank 0 listens; 0 if there was no launcher.

    """

    launcher: str
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    master_addr: str
    master_port: int


def init(backend: str | None = "ours", *, timeout: datetime.timedelta | None = None, **options: Any) -> Launch:
    """Join the job that torchrun, mpirun, mpiexec or srun started this process in, and return its place there.

    ``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK``, ``LOCAL_WORLD_SIZE``, ``MASTER_ADDR`` and ``MASTER_PORT`` are set as
    torchrun sets them, unless they are set already. A process that was started without a launcher becomes a job of one
    rank; its environment is left alone, because its child processes do not belong to that job. ``timeout`` and other
    keyword arguments are those of ``torch.distributed.init_process_group``.

    Raises:
        RuntimeError: If the group exists already.
        ValueError: If the environment is incomplete or contradicts itself; the message names the variable to set.

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
    return Launch(**_C.find_launch(lambda name: environment.get(name, "")))


def require_no_launcher(launch: Launch) -> None:
    """Raise ValueError if a launcher has started this process, so that --ranks would start ranks of each rank."""
    if launch.launcher != "none":
        raise ValueError(f"--ranks is for a machine alone, but {launch.launcher} has started this rank: leave it out")


def export(launch: Launch, environment: MutableMapping[str, str]) -> None:
    """Set those of torchrun's variables that are not set."""
    environment.setdefault("RANK", str(launch.rank))
    environment.setdefault("WORLD_SIZE", str(launch.world_size))
    environment.setdefault("LOCAL_RANK", str(launch.local_rank))
    environment.setdefault("LOCAL_WORLD_SIZE", str(launch.local_world_size))
    environment.setdefault("MASTER_ADDR", launch.master_addr)
    environment.setdefault("MASTER_PORT", str(launch.master_port))
