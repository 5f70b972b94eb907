"""What weighted gradients need from DistributedDataParallel beside the reducer."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

__all__ = ["requires_gradient_sync", "set_weight"]


def set_weight(model: Any, weight: float) -> None:
    """Carry out ``DistributedDataParallel.set_weight``."""
    if not isinstance(weight, (int, float)) or isinstance(weight, bool):
        raise ValueError(
            f"The weight of a rank must be an int or a float; got {weight!r}. A tensor with one element has item()."
        )
    if not 0 <= weight < float("inf"):
        raise ValueError(f"The weight of a rank must be finite and not negative; got {weight!r}.")
    if model._use_python_reducer or model._delay_all_reduce_params:
        what = "the Python reducer" if model._use_python_reducer else "delay_all_reduce_named_params"
        raise RuntimeError(f"set_weight() does not work with {what}, which averages gradients outside this package.")
    reducer = model.reducer
    if model._join_config.enable and not reducer._uses_weights() and reducer._expects_gradients():
        raise RuntimeError(
            "Once join() has been used, the first set_weight() must come before forward, which tells ranks that have "
            "run out of input that weights are in use. Call it before forward, or with any weight before join()."
        )
    reducer._set_weight(float(min(weight, 1e308)))  # an integer may be too large for a float


def requires_gradient_sync(model: Any, joined: bool) -> bool | None:
    """Tell the ranks that have ``joined`` whether the others will reduce gradients, and whether weights are in use.

    Only those ranks get an answer; the others do not wait for it.
    """
    flags = [not joined and model.require_backward_grad_sync, model.reducer._uses_weights()]
    tensor = torch.tensor(flags, dtype=torch.float32, device=model.device)
    work = dist.all_reduce(tensor, group=model.process_group, async_op=True)
    if not joined:
        return None
    work.wait()
    reduces, weighted = tensor.tolist()
    if weighted:
        model.reducer._use_weights()
    return reduces != 0
