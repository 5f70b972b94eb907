"""The argument ``bad_gradients`` of DistributedDataParallel: what to do about NaN and infinite values."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["take"]

_REACTIONS = ("warn", "raise", "skip")


def take(arguments: dict[str, Any], module: torch.nn.Module) -> str:
    """Remove the argument from those of the constructor, and return it; an empty string stands for None.

    Raises ValueError if it is neither None nor one of the three words, or if the optimizers of ``module`` run in
    backward and could not be kept from their step.
    """
    reaction = arguments.pop("bad_gradients", None)
    if reaction is None:
        return ""
    if reaction not in _REACTIONS:
        raise ValueError(f"bad_gradients must be 'warn', 'raise', 'skip' or None, and not {reaction!r}")
    in_backward = any(hasattr(parameter, "_in_backward_optimizers") for parameter in module.parameters())
    if in_backward and reaction != "warn":
        raise ValueError(
            f"bad_gradients={reaction!r} comes too late for optimizers that run in backward, since they have used the "
            "gradients by then; choose 'warn', or let the optimizer step after backward"
        )
    return str(reaction)
