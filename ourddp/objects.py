"""Python objects of all ranks: from one rank to all, and from all to all. Also errors, so that all ranks raise them."""

from __future__ import annotations

import pickle
import struct
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["allgather_object", "broadcast_object", "raise_on_all"]

# What one collective carries for each rank. Longer objects take a second one.
SHORT_BYTES = 4096
LENGTH = struct.Struct("<q")


@dataclass
class _Unpicklable:
    """Travels in the place of an object that its rank could not pickle."""

    why: str


def allgather_object(obj: Any, name: str | None = None, *, process_group: dist.ProcessGroup | None = None) -> list[Any]:
    """Return every rank's ``obj``, by rank; all ranks of ``process_group`` have to call it.

    It takes one collective if no rank's pickled object is longer than 4 kB, and otherwise two. Only ranks that trust
    each other may call it, as unpickling runs code. ``name`` is there for Horovod's programs and has no effect.

    Raises ValueError, on all ranks, if an object cannot be pickled; the message names the ranks.
    """
    ranks = dist.get_world_size(process_group)
    device = _device(process_group)
    data = _pickled(obj)
    head = (LENGTH.pack(len(data)) + data[: SHORT_BYTES - LENGTH.size]).ljust(SHORT_BYTES, b"\0")
    pieces = _gather_bytes(head, ranks, device, process_group)
    lengths = [LENGTH.unpack_from(piece)[0] for piece in pieces]
    pieces = [piece[LENGTH.size :] for piece in pieces]
    longest = max(lengths) + LENGTH.size - SHORT_BYTES
    if longest > 0:
        tail = data[SHORT_BYTES - LENGTH.size :].ljust(longest, b"\0")
        tails = _gather_bytes(tail, ranks, device, process_group)
        pieces = [piece + rest for piece, rest in zip(pieces, tails, strict=True)]
    objects = [pickle.loads(piece[:length]) for piece, length in zip(pieces, lengths, strict=True)]
    failed = [f"rank {rank}: {each.why}" for rank, each in enumerate(objects) if isinstance(each, _Unpicklable)]
    if failed:
        raise ValueError(f"objects that cannot be pickled cannot be gathered: {'; '.join(failed)}")
    return objects


def broadcast_object(
    obj: Any = None, root_rank: int = 0, name: str | None = None, *, process_group: dist.ProcessGroup | None = None
) -> Any:
    """Return the ``obj`` of ``root_rank``, a rank of ``process_group``; all of its ranks have to call it.

    The root gets its own object back, and the others a copy; what they pass does not matter. Only ranks that trust the
    root may call it, as unpickling runs code. ``name`` is there for Horovod's programs and has no effect.

    Raises ValueError, on all ranks, if the object cannot be pickled or there is no such rank.
    """
    is_root = require_root(root_rank, process_group)
    sent: list[Any] = [_pickled(obj) if is_root else None]
    dist.broadcast_object_list(sent, group=process_group, group_src=root_rank)
    received = pickle.loads(sent[0])
    if isinstance(received, _Unpicklable):
        raise ValueError(f"the object of rank {root_rank} cannot be pickled: {received.why}")
    return obj if is_root else received


def raise_on_all(what: str, error: BaseException | None, process_group: dist.ProcessGroup | None = None) -> None:
    """Raise RuntimeError on all ranks if any of them passes an error; collective.

    The message is ``what``, and each error with its rank.
    """
    own = None if error is None else f"{type(error).__name__}: {error}"
    texts = allgather_object(own, process_group=process_group)
    failed = [f"rank {rank}: {text}" for rank, text in enumerate(texts) if text is not None]
    if failed:
        raise RuntimeError(f"{what}: {'; '.join(failed)}") from error


def require_root(root_rank: int, process_group: dist.ProcessGroup | None) -> bool:
    """Return whether this is the root; ValueError if the group has no such rank."""
    ranks = dist.get_world_size(process_group)
    if not 0 <= root_rank < ranks:
        raise ValueError(f"root_rank is {root_rank}, but the group has the ranks 0 to {ranks - 1}")
    return dist.get_rank(process_group) == root_rank


def _pickled(obj: Any) -> bytes:
    try:
        return pickle.dumps(obj)
    except Exception as error:  # an object's own methods may raise anything
        return pickle.dumps(_Unpicklable(f"{type(error).__name__}: {error}"))


def _gather_bytes(own: bytes, ranks: int, device: torch.device, group: dist.ProcessGroup | None) -> list[bytes]:
    sent = torch.frombuffer(bytearray(own), dtype=torch.uint8).to(device)
    received = torch.empty(ranks * len(own), dtype=torch.uint8, device=device)
    dist.all_gather_into_tensor(received, sent, group=group)
    return [row.numpy().tobytes() for row in received.cpu().view(ranks, len(own))]


def _device(group: dist.ProcessGroup | None) -> torch.device:
    """Return where the group can send from: the CPU, unless it serves an accelerator alone."""
    if "cpu:" in dist.get_backend_config(group):
        return torch.device("cpu")
    return torch.accelerator.current_accelerator() or torch.device("cpu")
