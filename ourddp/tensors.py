"""Reductions, gathers and broadcasts that return a new tensor, by Horovod's names. Autograd does not see them."""

from __future__ import annotations

import torch
import torch.distributed as dist

from ourddp.compression import Average
from ourddp.objects import allgather_object, require_root

__all__ = ["allgather", "allreduce", "barrier", "broadcast"]


def allreduce(
    tensor: torch.Tensor,
    *,
    name: str | None = None,
    op: dist.ReduceOp.RedOpType = Average,
    process_group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """Return the average of the ranks' tensors, or what ``op`` makes of them, and leave ``tensor`` as it is.

    All ranks have to call it, with the same shape and dtype. Averages of integers are rounded towards zero. ``name`` is
    there for Horovod's programs and has no effect.
    """
    result = _copy(tensor)
    dist.all_reduce(result, op, group=process_group)
    return result


def allgather(
    tensor: torch.Tensor, name: str | None = None, *, process_group: dist.ProcessGroup | None = None
) -> torch.Tensor:
    """Return the ranks' tensors one after the other along the first dimension, whose length may differ.

    All ranks have to call it. It goes by :func:`ourddp.allgather_object`; for long tensors of one shape,
    ``torch.distributed.all_gather_into_tensor()`` is faster. ``name`` has no effect.

    Raises RuntimeError, on all ranks, if the tensors do not fit together.
    """
    return torch.cat(allgather_object(_copy(tensor).cpu(), process_group=process_group)).to(tensor.device)


def broadcast(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, *, process_group: dist.ProcessGroup | None = None
) -> torch.Tensor:
    """Return the tensor of ``root_rank``, a rank of ``process_group``, and leave ``tensor`` as it is.

    All ranks have to call it, with the same shape and dtype; ValueError if there is no such rank. ``name`` has no
    effect.
    """
    require_root(root_rank, process_group)
    result = _copy(tensor)
    dist.broadcast(result, group=process_group, group_src=root_rank)
    return result


def barrier(*, process_group: dist.ProcessGroup | None = None) -> None:
    """Wait until all ranks have called it."""
    dist.barrier(group=process_group)


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone(memory_format=torch.contiguous_format)
