"""Collectives that return their result and have gradients, for layers that are cut by hand: ``ourddp.functional``.

They leave their input as it is, and their result, which but for :func:`copy_to_ranks` is a new tensor, is ready when
they return. They take the time of the collective and of one operator of torch, since all of them are operators in C++
(``torch.ops.ours``), which ``torch.compile`` keeps in its graph, and in their order. They work over any process group;
``group`` is a group, the name of one, or None for the default group.

Gradients are those of the sum of all ranks' losses, as in ``torch.distributed.nn``. :func:`copy_to_ranks` and
:func:`reduce_from_ranks` are for tensor parallelism, where all ranks compute the same loss from the same activations.
A backward through any of them, but for that of :func:`reduce_from_ranks`, takes part in a collective. So either all
ranks run it or none, and the tensors that they give require gradients on all ranks or on none. Neither forward-mode
derivatives nor the transforms of ``torch.func`` work.

All of them raise ValueError for an unknown ``op`` and for what is no group of this rank, and RuntimeError for the name
of no group. What does not fit together is the group's to refuse, which over ``ours`` is a ValueError, too.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch._library.effects import EffectType
from torch.distributed.distributed_c10d import _get_default_group, _get_group_size_by_name

from ourddp import _C  # noqa: F401  # which defines torch.ops.ours

__all__ = [
    "all_gather",
    "all_reduce",
    "all_to_all",
    "broadcast",
    "copy_to_ranks",
    "reduce",
    "reduce_from_ranks",
    "reduce_scatter",
]

# The other ranks wait for a call whose result this one does not use, and expect all calls in the same order: a compiler
# must neither leave one out nor exchange two.
for _operator in (
    torch.ops.ours.all_reduce,
    torch.ops.ours.all_gather_into_tensor,
    torch.ops.ours.reduce_scatter_tensor,
    torch.ops.ours.all_to_all_single,
    torch.ops.ours.reduce,
    torch.ops.ours.broadcast,
):
    torch.library._register_effectful_op(_operator.default, EffectType.ORDERED)

Group = dist.ProcessGroup | str | None


def all_reduce(tensor: torch.Tensor, op: str = "sum", group: Group = None) -> torch.Tensor:
    """Return what ``op`` makes of all ranks' tensors, which have the same shape and dtype.

    ``op`` is ``"sum"``, ``"avg"``, ``"product"``, ``"min"``, ``"max"``, ``"band"``, ``"bor"`` or ``"bxor"``. The first
    two have gradients: the same reduction of the ranks' gradients.
    """
    return torch.ops.ours.all_reduce(tensor, op, _name_of(group))


def all_gather(tensor: torch.Tensor, dim: int = 0, group: Group = None) -> torch.Tensor:
    """Return all ranks' tensors, of the same shape and dtype, one after the other along dimension ``dim``.

    Tensors without dimensions become a vector. The gradient is the rank's part of the sum of the ranks' gradients.
    Raises IndexError if there is no such dimension.
    """
    name = _name_of(group)
    gathered = torch.ops.ours.all_gather_into_tensor(_with_first(dim, tensor), _get_group_size_by_name(name), name)
    return gathered if dim == 0 else gathered.movedim(0, dim)


def reduce_scatter(tensor: torch.Tensor, op: str = "sum", dim: int = 0, group: Group = None) -> torch.Tensor:
    """Return the rank's part of what ``op`` makes of all ranks' tensors, cut into equal parts along dimension ``dim``.

    ``op`` is as in :func:`all_reduce`. With ``"sum"`` and ``"avg"`` the gradient is all ranks' gradients, gathered.
    Raises IndexError if there is no such dimension.
    """
    name = _name_of(group)
    part = torch.ops.ours.reduce_scatter_tensor(_with_first(dim, tensor), op, _get_group_size_by_name(name), name)
    return part if dim == 0 else part.movedim(0, dim)


def all_to_all(
    tensor: torch.Tensor,
    output_sizes: Sequence[int] | None = None,
    input_sizes: Sequence[int] | None = None,
    group: Group = None,
) -> torch.Tensor:
    """Send part i of the tensor to rank i, and return the parts that came from the ranks, in their order.

    Parts are along the first dimension: equal ones, or of ``input_sizes`` and, for what comes, ``output_sizes``. The
    gradient goes back the same way.
    """
    return torch.ops.ours.all_to_all_single(tensor, output_sizes or [], input_sizes or [], _name_of(group))


def broadcast(tensor: torch.Tensor, src: int, group: Group = None) -> torch.Tensor:
    """Return the tensor of rank ``src`` of the group; those of the others have its shape and dtype.

    The gradient of that rank's tensor is the sum of all ranks' gradients; the others' is zero.
    """
    return torch.ops.ours.broadcast(tensor, src, _name_of(group))


def reduce(tensor: torch.Tensor, dst: int, op: str = "sum", group: Group = None) -> torch.Tensor:
    """Return, on rank ``dst`` of the group, what ``op`` makes of all ranks' tensors, and zeros on the others.

    ``op`` is as in :func:`all_reduce`. With ``"sum"`` and ``"avg"`` the gradient is that of rank ``dst``.
    """
    return torch.ops.ours.reduce(tensor, op, dst, _name_of(group))


def copy_to_ranks(tensor: torch.Tensor, group: Group = None) -> torch.Tensor:
    """Return the tensor, which all ranks have alike, for use by layers of which each rank has a part.

    Its gradient is the sum of the ranks' gradients. The result shares the tensor's memory, so neither may be changed in
    place. This is ``f`` of Megatron-LM, section 3 of https://arxiv.org/abs/1909.08053; :func:`reduce_from_ranks` is
    ``g``.
    """
    return torch.ops.ours.copy_to_ranks(tensor, _name_of(group))


def reduce_from_ranks(tensor: torch.Tensor, group: Group = None) -> torch.Tensor:
    """Return the sum of all ranks' tensors, for use by layers that all ranks compute alike.

    Its gradient, which is the same on all ranks, is passed on as it is.
    """
    return torch.ops.ours.reduce_from_ranks(tensor, _name_of(group))


def _with_first(dim: int, tensor: torch.Tensor) -> torch.Tensor:
    return tensor if dim == 0 else tensor.movedim(dim, 0)


def _name_of(group: Group) -> str:
    if isinstance(group, str):
        return group
    if group is None:
        group = _get_default_group()
    elif not isinstance(group, dist.ProcessGroup):
        raise ValueError(f"{group!r} is no process group, or none that this rank is a member of")
    return group.group_name
