"""The place of this process in its job, by Horovod's names. ``ourddp.init()`` joins the job."""

from __future__ import annotations

import os

import torch.distributed as dist

from ourddp.joining import Launch, find

__all__ = ["is_initialized", "local_rank", "local_size", "rank", "shutdown", "size"]


def is_initialized() -> bool:
    """Return whether this process has joined its job, by ``ourddp.init()`` or ``init_process_group()``."""
    return dist.is_initialized()


def rank() -> int:
    """Return the number of this process in the job, 0 to ``size() - 1``; RuntimeError before ``init()``."""
    _require_job()
    return dist.get_rank()


def size() -> int:
    """Return the number of processes in the job; RuntimeError before ``init()``."""
    _require_job()
    return dist.get_world_size()


def local_rank() -> int:
    """Return the number of this process among those of the job on its node.

    Raises RuntimeError before ``init()``, and if the environment does not tell, as for processes that a program has
    started by itself.
    """
    return _place().local_rank


def local_size() -> int:
    """Return the number of processes of the job on this node. Raises what :func:`local_rank` does."""
    return _place().local_world_size


def shutdown() -> None:
    """Leave the job; nothing happens if this process is in none. ``init()`` may be called again afterwards."""
    if dist.is_initialized():
        dist.destroy_process_group()


def _require_job() -> None:
    if not dist.is_initialized():
        raise RuntimeError("this process has not joined a job: call ourddp.init() first")


def _place() -> Launch:
    _require_job()
    try:
        # Where rank 0 can be reached does not matter here, and processes that met without a port do not know it.
        launch = find({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", **os.environ})
    except ValueError as error:
        raise RuntimeError(f"this process's place on its node is not known: {error}") from error
    if (launch.rank, launch.world_size) != (rank(), size()):
        raise RuntimeError(
            f"the environment is that of rank {launch.rank} of {launch.world_size}, but this process is rank {rank()} "
            f"of {size()}, so its place on this node is not known: start the job by torchrun, mpirun or srun, or set "
            "RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE before ourddp.init()"
        )
    return launch
