"""Makes schedules of torch.distributed.pipelining for stages whose shapes are known."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensorMode

from ourddp.pipeline_checks import Settings

__all__ = ["Pipeline", "Skeleton", "Stage", "conditions", "make_pipeline"]


class Stage(nn.Sequential):
    """The layers of a stage. Its output is contiguous, as messages have to be."""

    def forward(self, input: Tensor) -> Tensor:
        """Return the output of the last layer."""
        return super().forward(input).contiguous()


class Skeleton:
    """A copy of all stages without memory, which tells the shapes and types of what they send to each other.

    Its tensors are fake ones. On the meta device, autocast would have no effect.
    """

    def __init__(self, stages: list[Stage]) -> None:
        """Copy the stages, and leave them as they are: their modules may have others in common."""
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        with FakeCopyMode(self._mode):
            # A batch norm in training mode would refuse a single sample.
            self._stages = nn.ModuleList(copy.deepcopy(stages)).eval()

    def __len__(self) -> int:
        return len(self._stages)

    def changes(self, convert: Callable[[Tensor], Tensor]) -> bool:
        """Return whether a function for ``nn.Module._apply()`` gives any weight another type or device."""
        with self._mode:
            weights = [(weight, convert(weight)) for weight in (*self._stages.parameters(), *self._stages.buffers())]
        return any((old.dtype, old.device) != (new.dtype, new.device) for old, new in weights)

    def apply(self, convert: Callable[[Tensor], Tensor]) -> None:
        """Do what ``nn.Module._apply()`` does, which cannot replace fake parameters."""
        with self._mode:
            for module in self._stages.modules():
                for name, parameter in [*module.named_parameters(recurse=False)]:
                    setattr(module, name, nn.Parameter(convert(parameter), parameter.requires_grad))
                for name, buffer in [*module.named_buffers(recurse=False)]:
                    setattr(module, name, convert(buffer))

    def shapes(self, micro_batch: Tensor, *, backward: bool) -> list[Tensor]:
        """Return tensors on the meta device like the inputs of all stages, and the outputs of the last one."""
        with self._mode, torch.set_grad_enabled(backward):
            found = [torch.empty_like(micro_batch).requires_grad_(micro_batch.requires_grad)]
            for index, stage in enumerate(self._stages):
                try:
                    found.append(stage(found[-1].detach().requires_grad_(found[-1].requires_grad)))
                except Exception as error:  # a layer may raise anything
                    raise ValueError(
                        f"stage {index} cannot tell the shape of its output for a micro-batch of shape "
                        f"{tuple(micro_batch.shape)}; it runs without values for that, so it must not need them: "
                        f"{error}"
                    ) from error
        return [
            torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype, device="meta").requires_grad_(
                fake.requires_grad
            )
            for fake in found
        ]


@dataclasses.dataclass(frozen=True)
class Pipeline:
    """A schedule for batches of one shape."""

    schedule: Any  # one of torch.distributed.pipelining
    conditions: tuple[Any, ...]
    outputs: Tensor  # on the meta device


def conditions(inputs: Tensor) -> tuple[Any, ...]:
    """Return everything about a batch, and what surrounds a call with it, that a pipeline is made for."""
    kind = inputs.device.type
    autocast = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
    return inputs.shape, inputs.dtype, inputs.device, *autocast


def make_pipeline(
    inputs: Tensor,
    own: dict[int, nn.Module],
    skeleton: Skeleton,
    group: dist.ProcessGroup,
    settings: Settings,
    loss_fn: Callable[[Tensor, Tensor], Tensor] | None,
) -> Pipeline:
    """Return a pipeline for batches like ``inputs``, which runs backward too if there is a loss function.

    ``own`` has this rank's stages by number.

    Raises:
        ValueError: If shapes cannot be found out, on all ranks.

    """
    # It loads FSDP, DTensor and more, which takes nearly as long as torch itself.
    from torch.distributed import pipelining

    count = settings.micro_batches if loss_fn else math.gcd(len(inputs), settings.micro_batches)
    shapes = skeleton.shapes(inputs[: len(inputs) // count], backward=loss_fn is not None)
    # With all shapes given, stages neither run forward to find them out, nor tell each other.
    stages = [
        pipelining.PipelineStage(
            module,
            stage,
            len(skeleton),
            inputs.device,
            input_args=shapes[stage],
            output_args=shapes[stage + 1],
            group=group,
        )
        for stage, module in own.items()
    ]
    if group.size() == 1:
        # torch 2.11 lets stages meet their neighbours first, but this rank, which has them all, cannot send to itself.
        for stage in stages:
            stage._get_init_p2p_neighbors_ops = list
    stage_or_stages = stages[0] if len(stages) == 1 else stages
    if loss_fn is None:
        # Forward alone has but one order for a single stage on each rank, and a simple one for several.
        kind = pipelining.ScheduleGPipe if len(stages) == 1 else pipelining.ScheduleLoopedBFS
        schedule = kind(stage_or_stages, count)
    else:
        kind = {
            "gpipe": pipelining.ScheduleGPipe,
            "1f1b": pipelining.Schedule1F1B,
            "interleaved": pipelining.ScheduleInterleaved1F1B,
        }[settings.schedule]
        # The loss is divided here, as scale_grads would divide gradients of earlier steps once more.
        schedule = kind(
            stage_or_stages,
            count,
            loss_fn=lambda outputs, targets: loss_fn(outputs, targets) / count,
            scale_grads=False,
        )
    outputs = shapes[-1].new_empty((shapes[-1].shape[0] * count, *shapes[-1].shape[1:]))
    return Pipeline(schedule, conditions(inputs), outputs)
