"""The random numbers of a rank, as something that a Checkpointer saves."""

from __future__ import annotations

import random
import sys
from typing import Any

import torch

__all__ = ["RandomState"]


class RandomState:
    """Stands for the state of this process's random numbers in a checkpoint.

    It has those of torch, on the CPU and on the current CUDA device, of Python's ``random`` and of NumPy if it is
    loaded. Each rank gets back its own, so that dropout goes on as if nothing had happened:

        checkpointer.save(step, model, optimizer, random=ourddp.RandomState())
        checkpointer.load(model, optimizer, random=ourddp.RandomState())

    A rank that the checkpoint does not know, since it was saved by fewer, keeps the state that it has. Mind that each
    ``iter(loader)`` of a DataLoader draws a number from torch's state unless the loader has a ``generator`` of its own.
    """

    differs_by_rank = True  # tells a Checkpointer to save the state of each rank

    def state_dict(self) -> dict[str, Any]:
        """Return the state that the random numbers have now."""
        state = {"torch": torch.get_rng_state(), "python": random.getstate()}
        if torch.cuda.is_available():
            state["cuda"] = torch.cuda.get_rng_state()
        if numpy := sys.modules.get("numpy"):
            state["numpy"] = numpy.random.get_state()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Set the state; what this process lacks, such as NumPy or a device, is left out."""
        torch.set_rng_state(state_dict["torch"])
        random.setstate(state_dict["python"])
        if "cuda" in state_dict and torch.cuda.is_available():
            torch.cuda.set_rng_state(state_dict["cuda"])
        numpy = sys.modules.get("numpy")
        if "numpy" in state_dict and numpy:
            numpy.random.set_state(state_dict["numpy"])
