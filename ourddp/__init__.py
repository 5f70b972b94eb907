"""A c10d backend and a DistributedDataParallel reducer for fast training on one machine or several.

Importing this package registers the backend: ``torch.distributed.init_process_group("ours")``.
"""

from __future__ import annotations

from ourddp import _elsewhere

__version__ = "0.1.0"
__all__ = [
    "Average",
    "Checkpointer",
    "Compression",
    "DataParallel",
    "DistributedDataParallel",
    "DistributedOptimizer",
    "Launch",
    "LinearScalingLR",
    "MisuseError",
    "ModelParallel",
    "RandomState",
    "ResumableSampler",
    "Stats",
    "Sum",
    "SyncBatchNorm",
    "Trial",
    "__version__",
    "allgather",
    "allgather_object",
    "allreduce",
    "average_metrics",
    "barrier",
    "broadcast",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "check_replicas",
    "cuda_built",
    "functional",
    "gloo_built",
    "init",
    "is_initialized",
    "launch",
    "local_rank",
    "local_size",
    "mpi_built",
    "nccl_built",
    "preempted",
    "rank",
    "register",
    "rocm_built",
    "serve_metrics",
    "shared_tensors",
    "shutdown",
    "size",
    "stats",
    "sweep",
    "timeline",
    "watch_preemption",
]

if _elsewhere.is_built(_elsewhere.HERE):
    import torch

    from ourddp import _build_info

    if torch.__version__.partition("+")[0] != _build_info.TORCH_VERSION:
        raise ImportError(
            f"ourddp was built for torch {_build_info.TORCH_VERSION}, but torch {torch.__version__} is running. "
            "Rebuild it with 'pip install --no-build-isolation .' in its source folder, or install that torch."
        )

    from ourddp import (
        functional,
        whereabouts,  # noqa: F401  # so that it need not be loaded when another process asks
    )
    from ourddp._C import MisuseError
    from ourddp.built import cuda_built, gloo_built, mpi_built, nccl_built, rocm_built
    from ourddp.checkpointer import Checkpointer
    from ourddp.compression import Average, Compression, Sum
    from ourddp.data_parallel import DataParallel
    from ourddp.distributed import DistributedDataParallel
    from ourddp.distributed_optimizer import DistributedOptimizer
    from ourddp.job import is_initialized, local_rank, local_size, rank, shutdown, size
    from ourddp.joining import Launch, init
    from ourddp.launching import launch
    from ourddp.lr_schedule import LinearScalingLR
    from ourddp.metrics import average_metrics
    from ourddp.metrics_server import serve_metrics
    from ourddp.model_parallel import ModelParallel
    from ourddp.objects import allgather_object, broadcast_object
    from ourddp.preemption import preempted, watch_preemption
    from ourddp.random_state import RandomState
    from ourddp.registration import register
    from ourddp.replica_check import check_replicas
    from ourddp.resumable_sampler import ResumableSampler
    from ourddp.sharing import shared_tensors
    from ourddp.state_broadcast import broadcast_optimizer_state, broadcast_parameters
    from ourddp.stragglers import Stats, stats
    from ourddp.sweeps import sweep
    from ourddp.sync_batch_norm import SyncBatchNorm
    from ourddp.tensors import allgather, allreduce, barrier, broadcast
    from ourddp.tracing import timeline
    from ourddp.trials import Trial

    register()
else:
    _elsewhere.load()
