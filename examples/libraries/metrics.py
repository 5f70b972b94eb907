"""Trains on handwritten digits, and measures accuracy and a confusion matrix of all ranks with torchmetrics.

    torchrun --nproc_per_node=2 examples/libraries/metrics.py

Each rank looks at its share of the held-out images. A metric adds up counts, and compute() gathers those of all ranks
over the default process group, so it is told nothing about the backend.
"""

from __future__ import annotations

import digits
import torch
import torch.distributed as dist
import ways
from torch import nn
from torch.nn import functional
from torchmetrics import MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassConfusionMatrix
from train import split_digits

import ourddp


@torch.no_grad()
def measure(model: nn.Module, seed: int) -> dict[str, torch.Tensor]:
    """Return the metrics of the whole held-out set; every rank has to call it."""
    accuracy = MulticlassAccuracy(10, average="micro")
    metrics = MetricCollection({"accuracy": accuracy, "confusion": MulticlassConfusionMatrix(10)})
    images, labels = ways.tensors_of(split_digits(seed)[1])
    here = slice(dist.get_rank(), None, dist.get_world_size())
    metrics.update(model(images[here]), labels[here])
    return metrics.compute()


def main() -> None:
    """Read the command line and train."""
    args = digits.parse(digits.argument_parser(__doc__.splitlines()[0]))
    ourddp.init(args.backend)
    model = ourddp.DistributedDataParallel(digits.model(args.seed))
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
    for images, labels in digits.shares(args):
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
    measured = measure(model.module, args.seed)
    digits.finish(args, loss, model)
    if dist.get_rank() == 0:
        images = int(measured["confusion"].sum())
        print(f"by torchmetrics: accuracy {measured['accuracy']:.2%} of {images} images", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
