"""The learning rate for the batch of many ranks: the linear scaling rule, with a gradual warm-up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ourddp import job

__all__ = ["LinearScalingLR"]


class LinearScalingLR(torch.optim.lr_scheduler.LRScheduler):
    """Multiplies the learning rates by ``scale``, to which they rise from 1 during the first steps.

    This is the linear scaling rule with gradual warm-up of Goyal et al., Accurate, Large Minibatch SGD (2017,
    https://arxiv.org/abs/1706.02677): if the batch of a step is k times as large, so is the learning rate, and at first
    it rises from that of the small batch by the same amount in each step. There, warm-up takes five epochs. After ``t``
    calls of ``step()`` a rate is ::

        base * (1 + (scale - 1) * min(t / warmup_steps, 1)) * decay(t)

    where ``base`` is the rate that the optimizer was made with, meant for the batch of one rank.

    - ``warmup_steps`` is a number of calls of ``step()``: of batches, or of epochs. 0: no warm-up.
    - ``scale`` is by default the number of ranks, ``ourddp.size()``.
    - ``decay`` is another factor, such as ``lambda t: 0.1 ** (t // 30)``; at first it should be 1. Other schedulers
      cannot be chained with this one, since it computes each rate anew from ``base``.

    Neither ``scale`` nor ``decay`` is in ``state_dict()``, so a training that is resumed with another number of ranks
    goes on with the rate for that number, from the next ``step()`` on.

    Raises ValueError if ``warmup_steps`` is negative or ``scale`` not positive, and RuntimeError without ``scale``
    before ``ourddp.init()``.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        warmup_steps: int,
        *,
        scale: float | None = None,
        decay: Callable[[int], float] | None = None,
        last_epoch: int = -1,
    ) -> None:
        if warmup_steps < 0:
            raise ValueError(f"warmup_steps must not be negative; got {warmup_steps}")
        if scale is not None and scale <= 0:
            raise ValueError(f"scale must be positive; got {scale}")
        self.warmup_steps = warmup_steps
        self.scale = float(job.size() if scale is None else scale)
        self.decay = decay
        super().__init__(optimizer, last_epoch)

    def factor(self, step: int) -> float:
        """Return what the rates are multiplied by after ``step`` calls of ``step()``."""
        risen = min(step / self.warmup_steps, 1.0) if self.warmup_steps else 1.0
        return (1 + (self.scale - 1) * risen) * (self.decay(step) if self.decay else 1.0)

    def get_lr(self) -> list[Any]:
        """Return the learning rate of each group of parameters."""
        return [base * self.factor(self.last_epoch) for base in self.base_lrs]

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint needs: all but the optimizer, ``scale`` and ``decay``."""
        return {name: value for name, value in super().state_dict().items() if name not in ("scale", "decay")}
