"""Training steps to time: models, and the ways of training them with several ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import ourddp

WARM_UPS = 4  # buckets are assigned anew in the second step, and with "auto" in the fourth
VARIANTS: dict[str, tuple[str, str, dict[str, Any]]] = {  # name: (whose DistributedDataParallel, backend, arguments)
    "local": ("", "", {}),
    "torch+gloo": ("torch", "gloo", {}),
    "torch+nccl": ("torch", "nccl", {}),
    "torch+ours": ("torch", "ours", {}),
    "ourddp+gloo": ("ours", "gloo", {}),
    "ourddp+ours": ("ours", "ours", {}),
    "ourddp+auto": ("ours", "ours", {"bucket_cap_mb": "auto"}),
    "ourddp+views": ("ours", "ours", {"gradient_as_bucket_view": True}),
    "ourddp+checks": ("ours", "ours", {"bad_gradients": "raise"}),
}


class ManySmall(nn.Module):
    """1,000 parameters of 1 KiB, each used once."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ParameterList(torch.randn(256) for _ in range(1000))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Map inputs (N, 1) to (N, 256000)."""
        return inputs * torch.cat(list(self.parts))


def mlp() -> tuple[nn.Module, torch.Tensor]:
    """Return a perceptron with 50 MB of gradients and a batch of 32."""
    widths = (1024, 2048, 2048, 2048, 1000)
    layers: list[nn.Module] = []
    for width, following in pairwise(widths):
        layers += [nn.Linear(width, following), nn.ReLU()]
    return nn.Sequential(*layers[:-1]), torch.randn(32, 1024)


def cnn() -> tuple[nn.Module, torch.Tensor]:
    """Return a convolutional network with 19 MB of gradients and 8 images of 32x32."""
    layers: list[nn.Module] = []
    channels = 3
    for width, repeats in ((64, 1), (128, 2), (256, 2), (512, 2)):
        for _ in range(repeats):
            layers += [nn.Conv2d(channels, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()]
            channels = width
        layers.append(nn.MaxPool2d(2))
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(512 * 2 * 2, 100)), torch.randn(8, 3, 32, 32)


def transformer() -> tuple[nn.Module, torch.Tensor]:
    """Return a transformer of six layers with 43 MB of gradients and 4 sequences of 32."""
    layer = nn.TransformerEncoderLayer(384, 6, 1536, dropout=0.0, batch_first=True, norm_first=True)
    return nn.TransformerEncoder(layer, 6, enable_nested_tensor=False), torch.randn(4, 32, 384)


def many_small() -> tuple[nn.Module, torch.Tensor]:
    """Return a model of which nearly all the time goes into its 1,000 parameters, and a batch of 1."""
    return ManySmall(), torch.randn(1, 1)


MODELS = {"mlp": mlp, "cnn": cnn, "transformer": transformer, "many-small": many_small}


def wrap(model: nn.Module, variant: str, groups: Mapping[str, dist.ProcessGroup]) -> nn.Module:
    """Return the model as the variant trains it."""
    whose, backend, arguments = VARIANTS[variant]
    if not whose:
        return model
    if whose == "torch":
        return nn.parallel.DistributedDataParallel(model, process_group=groups[backend], **arguments)
    return ourddp.DistributedDataParallel(model, process_group=groups[backend], **arguments)


def training_step(model: nn.Module, inputs: torch.Tensor) -> Callable[[], None]:
    """Return a function that does one training step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step() -> None:
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()

    return step


def check_alike(gradient: torch.Tensor, reference: torch.Tensor, whose: str) -> None:
    """Raise RuntimeError if a step's gradients are not those of the reference."""
    apart = (gradient - reference).abs().max() / reference.abs().max()
    if not apart < 1e-4:
        raise RuntimeError(f"the gradients of {whose}: {apart}")
