"""Brings the weights of a model's stages, which are parameters and buffers, to the ranks that need them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

__all__ = ["broadcast", "free_all_but", "of", "send"]

_BROADCAST_BYTES = 250 << 20  # at a time, as in torch's DistributedDataParallel


def of(stage: nn.Module) -> list[Tensor]:
    """Return all weights of a stage."""
    return [*stage.parameters(), *stage.buffers()]


@torch.no_grad()
def send(stages: Sequence[nn.Module], group: dist.ProcessGroup) -> None:
    """Give each stage the weights of rank 0 on the rank that runs it, which is the stage's number modulo all ranks."""
    rank = dist.get_rank(group)
    for index, stage in enumerate(stages):
        owner = index % dist.get_world_size(group)
        if owner == 0 or rank not in (0, owner):
            continue
        for tensor in of(stage):
            buffer = tensor.contiguous()
            if rank == 0:
                dist.send(buffer, group_dst=owner, group=group)
            else:
                dist.recv(buffer, group_src=0, group=group)
                tensor.copy_(buffer)


def free_all_but(own: Mapping[int, nn.Module], stages: Sequence[nn.Module]) -> None:
    """Move all stages to the meta device except a rank's own, by number."""
    # Modules without parameters may be in several stages; what they have stays here if one of these is an own stage.
    kept = {id(buffer) for stage in own.values() for buffer in stage.buffers()}
    for index, stage in enumerate(stages):
        if index not in own:
            stage._apply(lambda tensor: tensor if id(tensor) in kept else tensor.to("meta"))


def broadcast(tensors: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """Give tensors the values that they have on the group's first rank."""
    if tensors:
        dist._broadcast_coalesced(group, [tensor.detach() for tensor in tensors], _BROADCAST_BYTES, 0)
