"""Trains a small convolutional network on handwritten digits, data-parallel.

    torchrun --nproc_per_node=4 examples/train.py

The data are the 1,797 images of 8x8 pixels that scikit-learn ships, a fifth of them held out. Any backend and either
DistributedDataParallel will do (`--backend gloo --ddp torch`); the loss curve is the same except for rounding.

Every rank has a batch of its own, so more ranks make a larger batch, and fewer steps in an epoch. With the same
learning rate the weights then do not get as far, and the accuracy falls. The linear scaling rule makes up for it (Goyal
et al., Accurate, Large Minibatch SGD, 2017, https://arxiv.org/abs/1706.02677): --lr is meant for a batch of 16, and is
multiplied by the batch of all ranks over 16. The first steps could not bear that much, so the rate rises to it over
some epochs. docs/training.md has the accuracy with 1 to 8 ranks.
"""

from __future__ import annotations

import argparse
from itertools import islice

import common
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset

BATCH = 16  # the samples in a step that --lr is meant for
FIXED = ("seed",)  # flags that a resumed training must have the same of


def split_digits(seed: int) -> tuple[Subset, Subset]:
    """Return (training set, held-out set) of images (1, 8, 8) in [0, 1] and labels; the same for the same seed."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    dataset = TensorDataset(images, torch.tensor(digits.target))
    order = torch.randperm(len(dataset), generator=torch.Generator().manual_seed(seed)).tolist()
    held_out = len(dataset) // 5
    return Subset(dataset, order[held_out:]), Subset(dataset, order[:held_out])


def make_model(dropout: float = 0.25) -> nn.Module:
    """Return a network from images (N, 1, 8, 8) to the logits of ten digits (N, 10)."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(dropout),
        nn.Linear(64 * 4 * 4, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )


@torch.no_grad()
def evaluate(model: nn.Module, held_out: Subset, rank: int, ranks: int) -> dict[str, float]:
    """Return loss and accuracy over the held-out set; each rank looks at its own share, every sample counts once."""
    model.eval()
    device = next(model.parameters()).device
    average = common.Average()
    share = Subset(held_out, range(rank, len(held_out), ranks))
    for images, labels in DataLoader(share, batch_size=256):
        images, labels = images.to(device), labels.to(device)
        logits = model(images)
        average.add(functional.cross_entropy(logits, labels).item(), logits, labels)
    return average.over_ranks()


def peak_rate(args: argparse.Namespace, ranks: int) -> float:
    """Return the highest learning rate: --lr, scaled by the batch of all ranks over BATCH."""
    return args.lr * args.batch_size * ranks / BATCH if args.scale_lr else args.lr


def train(args: argparse.Namespace, rank: int, ranks: int) -> float:
    """Train, print each epoch's metrics and return the accuracy on the held-out set."""
    torch.manual_seed(args.seed)
    training_set, held_out = split_digits(args.seed)
    sampler = DistributedSampler(training_set, ranks, rank, seed=args.seed)
    loader = DataLoader(training_set, args.batch_size, sampler=sampler)
    model = make_model().to(args.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    state = {"model": model, "optimizer": optimizer}
    first_epoch, done = common.load_checkpoint(args, FIXED, **state)
    parallel = common.data_parallel(model, args.ddp)

    step, steps = first_epoch * len(loader) + done, args.epochs * len(loader)
    peak = peak_rate(args, ranks)
    schedule = {"start": min(args.lr, peak), "peak": peak, "warm_up": round(args.warmup_epochs * len(loader))}
    console = common.Console(args, steps, step, "images")
    console.print(f"{ranks} ranks, {len(training_set)} images to train on, {len(held_out)} held out")
    result = evaluate(model, held_out, rank, ranks)
    for epoch in range(first_epoch, min(args.epochs, args.stop_after or args.epochs)):
        sampler.set_epoch(epoch)  # another order every epoch, the same one after a resume
        common.seed_epoch(args.seed, epoch, done)
        parallel.train()
        average = common.Average()
        for images, labels in islice(loader, done, None):
            common.set_learning_rate(optimizer, common.learning_rate(step, steps, **schedule))
            optimizer.zero_grad()
            images, labels = images.to(args.device), labels.to(args.device)
            logits = parallel(images)
            loss = functional.cross_entropy(logits, labels)
            loss.backward()
            optimizer.step()
            step += 1
            average.add(loss.item(), logits, labels)
            console.step(loss.item())
            if common.preempted(args):
                common.end_early(console, step, len(loader), args, FIXED, **state)
                return result["accuracy"]
        done = 0
        metrics = average.over_ranks()
        result = evaluate(model, held_out, rank, ranks)
        console.epoch(epoch, metrics, result)
        common.save_checkpoint(epoch, args, FIXED, **state)
    console.print(f"held-out accuracy: {result['accuracy']:.2%}")
    console.close()
    return result["accuracy"]


def main() -> None:
    """Read the command line and train."""
    parser = common.argument_parser(__doc__.splitlines()[0], epochs=15, batch_size=BATCH, lr=0.04)
    parser.add_argument(
        "--scale-lr",
        action=argparse.BooleanOptionalAction,
        default=True,
        help=f"multiply --lr by the batch of all ranks over {BATCH}",
    )
    parser.add_argument("--warmup-epochs", type=float, default=3, help="epochs in which the rate rises from --lr")
    args = common.parse(parser)
    with common.process_group(args.backend, args.checkpoint, args.metrics, device=args.device) as (rank, ranks):
        train(args, rank, ranks)


if __name__ == "__main__":
    main()
