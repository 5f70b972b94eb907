"""Makes ``torch.distributed.init_process_group("ours")`` work.

``import ourddp`` registers the backend. A torch that looks for backends among the installed packages finds
``register`` by itself, so that no import is needed.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from ourddp import _C, engines, tracing

BACKEND = "ours"
DEVICES = ["cpu", "cuda"]


def _create(options: dist.distributed_c10d._DistributedBackendOptions, own_options: Any) -> dist.Backend:
    backend = _C.create_backend(options, own_options)
    # Only torch from 2.15 on has this attribute.
    tracing.start_as_asked(backend, ranks_come_later=getattr(options, "enable_reconfigure", False))
    return backend


def register() -> None:
    """Register the backend under the name ``ours`` for CPU and CUDA tensors. Further calls change nothing."""
    if BACKEND.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(BACKEND, _create, extended_api=True, devices=DEVICES)
    engines.register()
    if _C.records_flights():
        # Otherwise torch records each call by hooks around it, which take longer than a small all-reduce. If a version
        # of torch has renamed the set, only time is lost.
        recording = getattr(dist.distributed_c10d, "_FR_SELF_RECORDING_BACKENDS", set())
        recording.add(BACKEND)
