"""Makes schedules of torch.distributed.pipelining for stages whose shapes are known."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ourddp.pipeline_checks import Settings

__all__ = ["Pipeline", "Stage", "make_pipeline"]


class Stage(nn.Sequential):
    """The layers of a stage. Its output is contiguous, as messages have to be."""

    def forward(self, input: Tensor) -> Tensor:
        """Return the output of the last layer."""
        return super().forward(input).contiguous()


@dataclasses.dataclass(frozen=True)
class Pipeline:
    """A schedule for batches of one shape."""

    schedule: Any  # one of torch.distributed.pipelining
    inputs: tuple[torch.Size, torch.dtype]
    outputs: Tensor  # on the meta device


def make_pipeline(
    inputs: Tensor,
    own: dict[int, nn.Module],
    skeleton: list[Stage],
    group: dist.ProcessGroup,
    settings: Settings,
    loss_fn: Callable[[Tensor, Tensor], Tensor] | None,
) -> Pipeline:
    """Return a pipeline for batches like ``inputs``, which runs backward too if there is a loss function.

    ``own`` has this rank's stages by number, and ``skeleton`` all stages, on the meta device.

    Raises:
        ValueError: If shapes cannot be found out, on all ranks.

    """
    # It loads FSDP, DTensor and more, which takes nearly as long as torch itself.
    from torch.distributed import pipelining

    count = settings.micro_batches if loss_fn else math.gcd(len(inputs), settings.micro_batches)
    shapes = _shapes(inputs[: len(inputs) // count], skeleton, backward=loss_fn is not None)
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
    return Pipeline(schedule, (inputs.shape, inputs.dtype), outputs)


def _shapes(micro_batch: Tensor, skeleton: list[Stage], *, backward: bool) -> list[Tensor]:
    """Return tensors on the meta device like the inputs of all stages, and the outputs of the last one."""
    tensor = micro_batch.to("meta")
    shapes = [tensor]
    for index, stage in enumerate(skeleton):
        try:
            with torch.set_grad_enabled(backward):
                tensor = stage(tensor)
        except Exception as error:  # a layer may raise anything
            raise ValueError(
                f"stage {index} cannot tell the shape of its output for a micro-batch of shape "
                f"{tuple(micro_batch.shape)}; it runs on the meta device for that, so it must not need values: {error}"
            ) from error
        tensor = torch.empty_like(tensor).requires_grad_(tensor.requires_grad)
        shapes.append(tensor)
    return shapes
