"""Tensors in symmetric memory, for the tests of it."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.distributed as dist

with contextlib.suppress(ImportError):  # before torch 2.15 the tests are skipped
    import torch.distributed._symmetric_memory as symm_mem

COUNT = 1000


def share(count: int = COUNT, group: Any = None, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, Any]:
    """Return a tensor in symmetric memory, and its handle."""
    tensor = symm_mem.empty(count, dtype=dtype, device="cpu")
    return tensor, symm_mem.rendezvous(tensor, group or dist.group.WORLD)
