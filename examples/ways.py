"""What the small programs share that each show one way of parallel training: the digits, batches and start-up.

Every way trains on the same batches of all ranks together, so that their losses can be compared with one process.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator

import common
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import Subset
from train import make_model, split_digits

Batch = tuple[torch.Tensor, torch.Tensor]  # images (N, 1, 8, 8) and labels (N)
Step = Callable[[torch.Tensor, torch.Tensor], float]  # trains with a batch of all ranks, and returns its mean loss


def argument_parser(description: str) -> argparse.ArgumentParser:
    """Return a parser with the flags that all of these programs have."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--backend", default="ours", help="what init_process_group gets")
    parser.add_argument("--steps", type=at_least_one, default=300)
    parser.add_argument("--batch-size", type=at_least_one, default=48, help="samples in a step, of all ranks together")
    parser.add_argument("--lr", type=float, default=0.1, help="learning rate")
    parser.add_argument("--seed", type=int, default=0, help="of the first weights, and of the order of samples")
    return parser


def at_least_one(text: str) -> int:
    """Return the number that a flag has, or let argparse refuse it."""
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return int(text)


def model(seed: int) -> nn.Module:
    """Return the network of train.py without dropout, whose random numbers would differ from way to way."""
    torch.manual_seed(seed)
    return make_model(dropout=0.0)


def batches(args: argparse.Namespace) -> Iterator[Batch]:
    """Yield --steps batches of all ranks together; they are the same on all ranks."""
    training_set, _ = split_digits(args.seed)
    images, labels = tensors_of(training_set)
    generator = torch.Generator().manual_seed(args.seed)
    order = torch.empty(0, dtype=torch.int64)
    for _ in range(args.steps):
        while len(order) < args.batch_size:
            order = torch.cat([order, torch.randperm(len(labels), generator=generator)])
        chosen, order = order[: args.batch_size], order[args.batch_size :]
        yield images[chosen], labels[chosen]


def share(batch: Batch, rank: int, ranks: int) -> Batch:
    """Return a rank's part of a batch."""
    images, labels = batch
    return images.chunk(ranks)[rank], labels.chunk(ranks)[rank]


def check_batch(args: argparse.Namespace, ranks: int) -> None:
    """Refuse a batch of which the ranks that train would have parts of different sizes, with other means."""
    if args.batch_size % ranks:
        raise common.Refused(f"--batch-size {args.batch_size} is not a multiple of {ranks} ranks that train")


def tensors_of(subset: Subset) -> Batch:
    """Return all images and labels of a part of the digits."""
    images, labels = zip(*subset, strict=True)
    return torch.stack(images), torch.stack(labels)


@torch.no_grad()
def accuracy(trained: Callable[[torch.Tensor], torch.Tensor], seed: int) -> float:
    """Return which part of the held-out digits is recognised."""
    images, labels = tensors_of(split_digits(seed)[1])
    return (trained(images).argmax(1) == labels).float().mean().item()


def plain_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    """Return the step of a training in which nothing shows that there may be several ranks."""

    def step(images: torch.Tensor, labels: torch.Tensor) -> float:
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


def finish(args: argparse.Namespace, rank: int, loss: float, trained: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Let rank 0 print the last loss and the accuracy of what it has."""
    if rank == 0:
        print(f"loss {loss:.4f}, held-out accuracy {accuracy(trained, args.seed):.2%}", flush=True)
