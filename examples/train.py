"""Trains a small convolutional network on handwritten digits, data-parallel.

    torchrun --nproc_per_node=4 examples/train.py

The data are the 1,797 images of 8x8 pixels that scikit-learn ships, a fifth of them held out. Any backend and either
DistributedDataParallel will do (`--backend gloo --ddp torch`); the loss curve is the same but for rounding.
"""

from __future__ import annotations

import argparse

import common
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset


def split_digits(seed: int) -> tuple[Subset, Subset]:
    """Return (training set, held-out set) of images (1, 8, 8) in [0, 1] and labels; the same for the same seed."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    dataset = TensorDataset(images, torch.tensor(digits.target))
    order = torch.randperm(len(dataset), generator=torch.Generator().manual_seed(seed)).tolist()
    held_out = len(dataset) // 5
    return Subset(dataset, order[held_out:]), Subset(dataset, order[:held_out])


def make_model() -> nn.Module:
    """Return a network from images (N, 1, 8, 8) to the logits of ten digits (N, 10)."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.25),
        nn.Linear(64 * 4 * 4, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )


@torch.no_grad()
def evaluate(model: nn.Module, held_out: Subset, rank: int, ranks: int) -> dict[str, float]:
    """Return loss and accuracy over the held-out set; each rank looks at its own share, every sample counts once."""
    model.eval()
    average = common.Average()
    share = Subset(held_out, range(rank, len(held_out), ranks))
    for images, labels in DataLoader(share, batch_size=256):
        logits = model(images)
        average.add(functional.cross_entropy(logits, labels).item(), logits, labels)
    return average.over_ranks()


def train(args: argparse.Namespace, rank: int, ranks: int) -> float:
    """Train, print each epoch's metrics and return the accuracy on the held-out set."""
    torch.manual_seed(args.seed)
    training_set, held_out = split_digits(args.seed)
    sampler = DistributedSampler(training_set, ranks, rank, seed=args.seed)
    loader = DataLoader(training_set, args.batch_size, sampler=sampler)
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs * len(loader))
    state = {"model": model, "optimizer": optimizer, "schedule": schedule}
    first_epoch = common.load_checkpoint(args.checkpoint, args, **state)
    parallel = common.data_parallel(model, args.ddp)

    console = common.Console(args, args.epochs * len(loader), first_epoch * len(loader), "images")
    console.print(f"{ranks} ranks, {len(training_set)} images to train on, {len(held_out)} held out")
    result = evaluate(model, held_out, rank, ranks)
    for epoch in range(first_epoch, min(args.epochs, args.stop_after or args.epochs)):
        sampler.set_epoch(epoch)  # another order every epoch, the same one after a resume
        common.seed_epoch(args.seed, epoch)
        parallel.train()
        average = common.Average()
        for images, labels in loader:
            optimizer.zero_grad()
            logits = parallel(images)
            loss = functional.cross_entropy(logits, labels)
            loss.backward()
            optimizer.step()
            schedule.step()
            average.add(loss.item(), logits, labels)
            console.step(loss.item())
        metrics = average.over_ranks()
        result = evaluate(model, held_out, rank, ranks)
        console.epoch(epoch, metrics, result)
        common.save_checkpoint(args.checkpoint, epoch, args, **state)
    console.print(f"held-out accuracy: {result['accuracy']:.2%}")
    console.close()
    return result["accuracy"]


def main() -> None:
    """Read the command line and train."""
    parser = common.argument_parser(__doc__.splitlines()[0], epochs=15, batch_size=16, lr=3e-3)
    args = common.parse(parser)
    with common.process_group(args.backend) as (rank, ranks):
        train(args, rank, ranks)


if __name__ == "__main__":
    main()
