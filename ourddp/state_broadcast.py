"""Gives all ranks the parameters, or the optimizer's state, of one rank, by Horovod's names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree

from ourddp import _C
from ourddp.objects import broadcast_object, raise_on_all, require_root

__all__ = ["broadcast_optimizer_state", "broadcast_parameters"]


def broadcast_parameters(
    params: Mapping[str, torch.Tensor] | Iterable[torch.Tensor | tuple[str, torch.Tensor]],
    root_rank: int = 0,
    *,
    process_group: dist.ProcessGroup | None = None,
) -> None:
    """Give every rank the values that the tensors have at ``root_rank``, a rank of ``process_group``.

    ``params`` is ``model.state_dict()``, which has the buffers too, ``model.named_parameters()`` or
    ``model.parameters()``. All ranks have to call it, with tensors of the same shapes and dtypes.

    Raises:
        ValueError: If the group has no such rank.
        RuntimeError: On all ranks, if something is not a tensor, or tensors differ in their number, shapes or dtypes;
            the message names the first one, and the ranks.

    """
    is_root = require_root(root_rank, process_group)
    pairs = sorted(params.items()) if isinstance(params, Mapping) else params
    named = [pair if isinstance(pair, tuple) else (f"tensor {index}", pair) for index, pair in enumerate(pairs)]
    wrong = [f"{name} is of type {type(value).__name__}" for name, value in named if not torch.is_tensor(value)]
    error = TypeError(f"{', '.join(wrong)}; broadcast_object() takes any object") if wrong else None
    raise_on_all("broadcast_parameters() takes tensors", error, process_group)
    tensors = [value.detach() for _, value in named]
    _C.check_same_model(process_group or dist.group.WORLD, tensors, [name for name, _ in named])
    _broadcast(tensors, root_rank, is_root, process_group)


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer, root_rank: int = 0, *, process_group: dist.ProcessGroup | None = None
) -> None:
    """Give every rank the state of the optimizer of ``root_rank``: moments and the like, learning rates, momenta.

    The others need not have any state yet, as when only the root has loaded a checkpoint; state that the root lacks is
    dropped. All ranks have to call it, with optimizers over equal parameters.

    Raises:
        ValueError: If the group has no such rank.
        RuntimeError: On all ranks, if the root's state cannot be had, or not be sent because it is sharded, or does not
            fit the optimizer of a rank, whose number the message gives.

    """
    is_root = require_root(root_rank, process_group)
    state: Any = None
    tensors: list[torch.Tensor] = []
    error: Exception | None = None
    if is_root:
        try:
            state = pytree.tree_map_only(
                torch.Tensor, lambda tensor: _taken_out(tensor, tensors), optimizer.state_dict()
            )
        except Exception as failure:  # optimizers of programs may raise anything
            error = failure
    raise_on_all("the optimizer's state was not broadcast", error, process_group)
    state = broadcast_object(state, root_rank, process_group=process_group)
    if not is_root:
        state = pytree.tree_map_only(_Layout, lambda layout: _put_back(layout, tensors), state)
    _broadcast(tensors, root_rank, is_root, process_group)
    try:
        if not is_root:
            optimizer.load_state_dict(state)
    except Exception as misfit:  # optimizers of programs may raise anything
        error = misfit
    raise_on_all(f"the optimizer's state of rank {root_rank} does not fit", error, process_group)


@dataclass(frozen=True)
class _Layout:
    """Stands for a tensor that travels by itself."""

    shape: torch.Size
    dtype: torch.dtype
    device: str


def _taken_out(tensor: torch.Tensor, tensors: list[torch.Tensor]) -> torch.Tensor | _Layout:
    """Append the tensor to those that travel by themselves, unless it is a number."""
    if hasattr(tensor, "device_mesh"):
        raise ValueError(
            "it is sharded over the ranks; torch.distributed.checkpoint.state_dict.set_optimizer_state_dict() with "
            "broadcast_from_rank0=True gives each rank its part"
        )
    if tensor.dim() == 0:
        return tensor.detach().cpu()
    tensors.append(tensor.detach())
    return _Layout(tensor.shape, tensor.dtype, tensor.device.type)


def _put_back(layout: _Layout, tensors: list[torch.Tensor]) -> torch.Tensor:
    tensors.append(torch.empty(layout.shape, dtype=layout.dtype, device=layout.device))
    return tensors[-1]


def _broadcast(tensors: list[torch.Tensor], root: int, is_root: bool, group: dist.ProcessGroup | None) -> None:
    # Other backends than ours take contiguous tensors only.
    sent = [tensor.contiguous() for tensor in tensors]
    for work in [dist.broadcast(tensor, group=group, group_src=root, async_op=True) for tensor in sent]:
        work.wait()
    for tensor, received in zip(tensors, sent, strict=True):
        if not is_root and received is not tensor:
            tensor.copy_(received)
