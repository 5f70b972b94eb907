"""Lets ordinary tensors lie in memory that the ranks of a node share."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch.distributed as dist

from ourddp import _C
from ourddp.stragglers import backend_of


@contextlib.contextmanager
def shared_tensors(group: dist.ProcessGroup | None = None, *, least: int = 256 << 10) -> Iterator[None]:
    """Let the CPU tensors that this thread makes in the context lie where ``ours`` reduces them without copies.

    That is the heap of the group, which all ranks of its node map. An all-reduce of a tensor that lies there on all
    ranks reads and writes it in place: parameters and buffers of a model that is made in the context, for example, and
    gradients of a backward in it. They are ordinary tensors otherwise, which may outlive the context and the group.
    Where ranks have a node each there is no heap, and tensors get ordinary memory.

    Memory of the heap is taken when a tensor is made, and given back to the system when it is freed, so the context
    suits tensors that stay. Other threads make their tensors as before. Contexts may be nested; the innermost holds.

    Args:
        group: A process group of the backend ``ours``; by default the default group.
        least: Tensors of fewer bytes get ordinary memory. Ranks reduce short ones as a whole, which gains nothing here.

    Raises:
        ValueError: If the group is not one of ``ours``, or ``least`` is negative.

    """
    if least < 0:
        raise ValueError(f"least={least}: a number of bytes is not negative")
    backend = backend_of(group or dist.group.WORLD) if dist.is_initialized() else None
    if backend is None:
        raise ValueError(
            "tensors are shared by a process group of the backend ours; init_process_group('ours') makes one"
        )
    _C.begin_sharing_tensors(backend, least)
    del group, backend  # the program may destroy the group meanwhile
    try:
        yield
    finally:
        _C.end_sharing_tensors()
