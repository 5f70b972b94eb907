"""Optimizers that run in backward, for CPU modules; torch's own way needs an accelerator's streams."""

from __future__ import annotations

import weakref
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["set_up"]


def set_up(model: Any) -> None:
    """Let ``model``, a DistributedDataParallel, run its parameters' optimizers when a bucket has been averaged.

    The optimizers are those that ``torch.distributed.optim._apply_optimizer_in_backward`` gave to the parameters; they
    no longer run by themselves. Their parameters have no gradient after backward.

    Raises:
        RuntimeError: If the model has a communication hook: this is one.

    """
    # Already loaded by a program that uses such optimizers. At the top it would add a second to every import of ourddp.
    from torch.distributed.optim.apply_optimizer_in_backward import param_to_optim_hook_handle_map

    # This comes first, because the hook may be refused.
    model.register_comm_hook(weakref.ref(model), optimizer_in_backward_hook)
    for parameter in model._module_parameters:
        for handle in param_to_optim_hook_handle_map.get(parameter, []):
            handle.remove()
    model.reducer._set_optimizer_in_backward()


def optimizer_in_backward_hook(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average the bucket's gradients and hand them to the optimizers; ``state`` is a weak reference to the model."""
    model = state()
    parameters = bucket.parameters()
    gradients = bucket.gradients() or [bucket.buffer()]  # a sparse one is alone in its bucket
    world_size = model.process_group.size()

    def step(done: torch.futures.Future[Any]) -> torch.Tensor:
        done.value()  # raises if the reduction failed
        buffer = bucket.buffer()
        buffer.div_(world_size)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            optimizers = getattr(parameter, "_in_backward_optimizers", ())
            if optimizers:
                parameter.grad = gradient
                for optimizer in optimizers:
                    optimizer.step()
                parameter.grad = None
            elif parameter.grad is None:
                parameter.grad = gradient.clone()
            else:
                parameter.grad.copy_(gradient)
        return buffer

    return model.reducer._run_allreduce_hook(bucket).then(step)
