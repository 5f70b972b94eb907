"""Batch normalisation over the batches of all ranks, on the CPU too.

``SyncBatchNorm`` is a subclass of ``torch.nn.SyncBatchNorm``, with its interface, parameters and buffers.
torch's class refuses CPU tensors. This one takes them, over any process group, and leaves all others to torch's.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.nn import functional

__all__ = ["SyncBatchNorm"]


class SyncBatchNorm(nn.SyncBatchNorm):
    """Normalise each channel by its mean and variance over the batches of all ranks of ``process_group``.

    Arguments and state dict are those of ``torch.nn.SyncBatchNorm``. Inputs have the shape (N, C, ...), in
    ``float16``, ``bfloat16``, ``float32`` or ``float64``; N may differ between ranks and may be 0 on some. Each forward
    in training mode makes one all-reduce of 2 * C + 1 numbers, and each backward one of 2 * C, so all ranks have to run
    the same layers. The gradients of weight and bias are this rank's share of the sum over all ranks, as in torch.

    In evaluation mode, without a process group, or with one rank, it does what ``torch.nn.BatchNorm2d`` does.
    """

    def forward(self, input: Tensor) -> Tensor:
        """Return the normalised input: same shape and dtype.

        Raises:
            ValueError: If the input has less than two dimensions or no channels, or if all ranks together have a single
                value per channel, which has no variance.

        """
        if input.device.type != "cpu":
            return super().forward(input)
        group = self._group()
        if group is None:
            return nn.modules.batchnorm._BatchNorm.forward(self, input)
        self._check_input_dim(input)
        self._check_non_zero_input_channels(input)
        output, mean, variance, count = _Normalise.apply(input, self.weight, self.bias, self.eps, group)
        if self.track_running_stats and self.running_mean is not None:
            self._track(mean, variance, int(count))
        return output

    def _group(self) -> dist.ProcessGroup | None:
        """Return the group to synchronise with; None if there is nothing to synchronise."""
        if not (self.training and dist.is_initialized()):
            return None
        group = self.process_group or dist.group.WORLD
        return group if dist.get_world_size(group) > 1 else None

    @torch.no_grad()
    def _track(self, mean: Tensor, variance: Tensor, count: int) -> None:
        """Move the running statistics towards those of the batch, of `count` values per channel."""
        self.num_batches_tracked.add_(1)
        if count == 0:
            return
        factor = 1.0 / self.num_batches_tracked.item() if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), factor)
        self.running_var.lerp_((variance * (count / (count - 1))).to(self.running_var.dtype), factor)

    @classmethod
    def convert_sync_batchnorm(cls, module: nn.Module, process_group: Any | None = None) -> nn.Module:
        """Return ``module`` with all batch norm layers in it replaced by layers of this class, torch's own included.

        The layers keep their parameters and buffers; if ``module`` is such a layer itself, the result is a new one.

        Raises:
            ValueError: If a lazy layer does not know its number of channels yet.

        """
        converted = module
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            converted = cls._converted(module, process_group)
        for name, child in module.named_children():
            converted.add_module(name, cls.convert_sync_batchnorm(child, process_group))
        return converted

    @classmethod
    def _converted(cls, layer: nn.modules.batchnorm._BatchNorm, process_group: Any | None) -> SyncBatchNorm:
        if isinstance(layer, nn.modules.lazy.LazyModuleMixin) and layer.has_uninitialized_params():
            raise ValueError(
                f"{type(layer).__name__} does not know its number of channels yet: run a forward before converting it."
            )
        converted = cls(
            layer.num_features, layer.eps, layer.momentum, layer.affine, layer.track_running_stats, process_group
        )
        for name in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked"):
            setattr(converted, name, getattr(layer, name))
        converted.training = layer.training
        if hasattr(layer, "qconfig"):
            converted.qconfig = layer.qconfig
        return converted


class _Normalise(torch.autograd.Function):
    """Normalises over all ranks; also returns mean and variance (C,) and the number of values per channel, in float64.

    The all-reduce adds up sums and sums of squares in float64. Each rank derives its own from its local mean and
    variance, which are computed in float32 or better, so that little precision is lost when the mean is large.
    """

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        input: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        group: dist.ProcessGroup,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        values = _widened(input)
        local = input.numel() // input.size(1)
        sums = torch.zeros(2 * input.size(1) + 1, dtype=torch.float64)
        if local > 0:
            variance, mean = (part.double() for part in torch.var_mean(values, _others(input), correction=0))
            sums = torch.cat([mean * local, (variance + mean * mean) * local, sums.new_full((1,), local)])
        dist.all_reduce(sums, group=group)
        count = sums[-1]
        if count == 1:
            raise ValueError(
                "Expected more than 1 value per channel when training, got one on all ranks together: input size "
                f"{tuple(input.shape)} on rank {dist.get_rank(group)} of the group."
            )
        total, squares = (sums[:-1] / count.clamp(min=1)).view(2, -1)
        mean, variance = total, (squares - total * total).clamp_(min=0)
        ctx.save_for_backward(input, weight, mean, (variance + eps).rsqrt())
        ctx.count, ctx.group = count.item(), group
        ctx.mark_non_differentiable(mean, variance, count)
        ctx.bias_dtype = None if bias is None else bias.dtype
        kind = values.dtype
        scale_and_shift = (None if part is None else part.to(kind) for part in (weight, bias))
        if local == 0:
            return torch.empty_like(input), mean, variance, count
        output = functional.batch_norm(values, mean.to(kind), variance.to(kind), *scale_and_shift, False, 0.0, eps)
        return output.to(input.dtype), mean, variance, count

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        input, weight, mean, inverse_deviation = ctx.saved_tensors
        kind = _widened(input).dtype
        grad = grad.to(kind)
        centred = input.to(kind) - _per_channel(mean.to(kind), input)
        sums = torch.stack([grad.sum(_others(input)), (grad * centred).sum(_others(input))]).double()
        grad_input = grad_weight = grad_bias = None
        if ctx.needs_input_grad[1]:
            grad_weight = (sums[1] * inverse_deviation).to(weight.dtype)
        if ctx.needs_input_grad[2]:
            grad_bias = sums[0].to(ctx.bias_dtype)
        if ctx.needs_input_grad[0]:
            total = sums.clone()  # the gradients above may be views
            dist.all_reduce(total, group=ctx.group)
            mean_grad, mean_product = total / max(ctx.count, 1)
            slope = mean_product * inverse_deviation * inverse_deviation
            scale = inverse_deviation if weight is None else inverse_deviation * weight.double()
            mean_grad, slope, scale = (_per_channel(part.to(kind), input) for part in (mean_grad, slope, scale))
            grad_input = ((grad - mean_grad - centred * slope) * scale).to(input.dtype)
        return grad_input, grad_weight, grad_bias, None, None


def _others(input: Tensor) -> list[int]:
    """Return all dimensions except that of the channels."""
    return [dimension for dimension in range(input.dim()) if dimension != 1]


def _per_channel(values: Tensor, input: Tensor) -> Tensor:
    """Return values (C,) in a shape that broadcasts to the input's."""
    return values.view([1, -1] + [1] * (input.dim() - 2))


def _widened(input: Tensor) -> Tensor:
    """Return the input in float32 if its own precision is too low to compute in."""
    return input.float() if input.dtype in (torch.float16, torch.bfloat16) else input
