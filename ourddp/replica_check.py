"""Finds replicas of a model that have come apart, down to a single bit: :func:`check_replicas`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["check_every", "check_replicas"]

_MOST_NAMED = 3  # parameters whose first different element is looked for
_BLOCKS = 1024  # that a parameter is divided into for that, and the elements that are compared in the end
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Digests are added up with weights that are odd, so that a change of a single one always changes the sum.
_WEIGHT = 0x9E3779B97F4A7C15 - (1 << 64)  # as a signed number


def check_replicas(model: torch.nn.Module, *, buffers: bool = False, group: dist.ProcessGroup | None = None) -> None:
    """Raise an error on all ranks if the parameters of ``model`` are not the same bits on all ranks of ``group``.

    Each rank adds up the 64-bit words of each parameter, modulo 2^64, which reads the parameters once, and 8 bytes of
    each rank are exchanged. A change of a single word always changes the sum; several changes may cancel, which chance
    does once in 2^64, and words that trade places always do. The message names the ranks that differ from the majority,
    or all of them if there is none; the parameters; and for the first three of them an element that differs, with both
    values. With ``buffers``, the buffers are checked as well: do so where they are meant to be equal, as those of
    BatchNorm are only after forward has broadcast them.
    ``group`` defaults to that of a DistributedDataParallel, or to all ranks. All of its ranks have to call it at the
    same place, between backward and forward.

    Raises:
        RuntimeError: If replicas differ.
        ValueError: If a parameter is sharded: its parts are meant to differ.

    """
    if isinstance(model, torch.nn.parallel.DistributedDataParallel):
        group = group or model.process_group
        model = model.module
    tensors: dict[str, torch.Tensor] = dict(model.named_parameters())
    if buffers:
        tensors |= dict(model.named_buffers())
    for name, tensor in tensors.items():
        # The class is not imported for this, since that takes longer than the rest of this package.
        if hasattr(tensor, "device_mesh"):
            raise ValueError(
                f"{name} is sharded (a DTensor), so its parts differ from rank to rank: there is no replica"
            )
    found = _compare(tensors, group or dist.distributed_c10d._get_default_group())
    if found:
        raise RuntimeError(
            f"The replicas of the model differ: {found}. A bit may have flipped in memory, or the ranks have computed "
            "different updates; load the last checkpoint on all ranks"
        )


def check_every(model: Any, period: int | None) -> None:
    """Have ``model``, a DistributedDataParallel, checked at the beginning of each ``period``-th forward in training."""
    if period is None:
        return
    if not isinstance(period, int) or period < 1:
        raise ValueError(f"check_replicas_every must be the number of forwards from check to check, and not {period!r}")
    model.__dict__["_replica_checks"] = [period, 0]


def check_if_due(model: Any) -> None:
    """Count a forward that begins, whose buffers have been broadcast, and check the replicas if it is time."""
    counts = model.__dict__.get("_replica_checks")
    # A rank that has run out of input does not take part.
    if counts is None or not torch.is_grad_enabled() or model._join_config.enable:
        return
    counts[1] += 1
    if counts[1] % counts[0] == 0:
        check_replicas(model, buffers=model.broadcast_buffers)


def _compare(tensors: dict[str, torch.Tensor], group: dist.ProcessGroup) -> str:
    """Return what differs, in words; empty if nothing does."""
    if not tensors or group.size() == 1:
        return ""
    digests = torch.stack([_digest(tensor) for tensor in tensors.values()])
    together = _gather(_combine(digests), group)
    if bool((together == together[0]).all()):
        return ""
    by_rank = _gather(digests, group)
    texts = []
    for (name, tensor), column in zip(tensors.items(), by_rank.T.tolist(), strict=True):
        if len(set(column)) == 1:
            continue
        text = f"{_who(column)} in {name}"
        if len(texts) < _MOST_NAMED:
            text += _where(tensor, column, group)
        texts.append(text)
    return "; ".join(texts)


def _gather(own: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return the numbers of all ranks, in rows by rank, on the CPU."""
    of_all = own.new_empty(group.size() * own.numel())
    dist.all_gather_into_tensor(of_all, own, group=group)
    return of_all.cpu().view(group.size(), -1)


def _digest(tensor: torch.Tensor) -> torch.Tensor:
    """Return the sum of the elements' bits, taken as integers of 64 bits but for the last few, modulo 2^64."""
    values = tensor.detach()
    flat = (torch.view_as_real(values) if values.is_complex() else values).contiguous().view(-1)
    elements = flat.view(_INTEGERS[flat.element_size()])
    in_word = 8 // elements.element_size()
    if elements.storage_offset() % in_word:
        elements = elements.clone()
    end = elements.numel() // in_word * in_word
    return elements[:end].view(torch.int64).sum() + elements[end:].sum(dtype=torch.int64)


def _combine(digests: torch.Tensor) -> torch.Tensor:
    """Return one digest, in one dimension, of several."""
    weights = torch.arange(digests.numel(), device=digests.device) * 2 * _WEIGHT + 1
    return (digests * weights).sum(0, keepdim=True)


def _who(digests: Sequence[int]) -> str:
    """Say which ranks differ from most, or that there is no majority."""
    most, count = Counter(digests).most_common(1)[0]
    others = [rank for rank, digest in enumerate(digests) if digest != most]
    if count * 2 > len(digests):
        return _ranks(others) + (" differs from the others" if len(others) == 1 else " differ from the others")
    return f"{_ranks(range(len(digests)))} differ, and no majority agrees,"


def _ranks(ranks: Iterable[int]) -> str:
    numbers = [str(rank) for rank in ranks]
    return f"rank {numbers[0]}" if len(numbers) == 1 else f"ranks {', '.join(numbers[:-1])} and {numbers[-1]}"


def _where(tensor: torch.Tensor, digests: Sequence[int], group: dist.ProcessGroup) -> str:
    """Say which element is the first that differs between the first rank that does and one of the majority."""
    most = Counter(digests).most_common(1)[0][0]
    right = digests.index(most)
    wrong = next(rank for rank, digest in enumerate(digests) if digest != most)
    values = tensor.detach().contiguous().view(-1)
    begin, end = 0, values.numel()
    while end - begin > _BLOCKS:
        # What is left is divided into blocks, and the first block that differs is divided again.
        size = -(-(end - begin) // _BLOCKS)
        blocks = range(begin, end, size)
        own = torch.stack([_digest(values[at : min(at + size, end)]) for at in blocks])
        of_all = _gather(own, group)
        different = (of_all[right] != of_all[wrong]).nonzero()
        if different.numel() == 0:
            return ""  # the differences of several elements cancel in these sums
        begin = blocks[int(different[0])]
        end = min(begin + size, end)
    part = values[begin:end].contiguous()
    as_bytes = torch.view_as_real(part).view(-1) if part.is_complex() else part
    raw = as_bytes.view(torch.uint8)
    of_all = _gather(raw, group).view(group.size(), end - begin, -1)
    different = (of_all[right] != of_all[wrong]).any(1).nonzero()
    place = int(different[0])
    index = tuple(int(i) for i in torch.unravel_index(torch.tensor(begin + place), tensor.shape))
    bits = [int.from_bytes(bytes(of_all[rank, place].tolist()), "little") for rank in (wrong, right)]
    changed = bits[0] ^ bits[1]
    flipped = f"bit {changed.bit_length() - 1}" if changed.bit_count() == 1 else f"{changed.bit_count()} bits"
    shown = [_value(of_all[rank, place], tensor.dtype) for rank in (wrong, right)]
    return f"{list(index)} ({shown[0]} on rank {wrong}, {shown[1]} on rank {right}: {flipped})"


def _value(raw: torch.Tensor, dtype: torch.dtype) -> Any:
    if dtype.is_complex:
        return torch.view_as_complex(raw.clone().view(dtype.to_real())).item()
    return raw.clone().view(dtype).item()
