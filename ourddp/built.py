"""What this copy of ourddp and its torch were built with, by Horovod's names. ``python -m ourddp info`` says more."""

from __future__ import annotations

import torch
import torch.distributed as dist

from ourddp import _build_info

__all__ = ["cuda_built", "gloo_built", "mpi_built", "nccl_built", "rocm_built"]


def mpi_built() -> bool:
    """Return whether MPI can carry data between nodes (``OURS_INTERNODE=mpi``)."""
    return _is_on("MPI")


def cuda_built() -> bool:
    """Return whether collectives of CUDA tensors were built. A GPU need not be here."""
    return _is_on("CUDA")


def nccl_built() -> bool:
    """Return whether collectives of CUDA tensors can use NCCL, which is loaded where it is installed."""
    # torch for CUDA comes with it.
    return cuda_built() and dist.is_nccl_available()


def gloo_built() -> bool:
    """Return whether this torch has Gloo, which can carry data between nodes (``OURS_INTERNODE=gloo``)."""
    return dist.is_gloo_available()


def rocm_built() -> bool:
    """Return whether this torch is one for AMD's GPUs."""
    return torch.version.hip is not None


def _is_on(engine: str) -> bool:
    return _build_info.ENGINES.get(engine, "off").startswith("on")
