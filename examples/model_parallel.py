"""Trains a network on handwritten digits that is cut by layer: each rank has some of the layers, none has all.

    torchrun --nproc_per_node=4 examples/model_parallel.py
    torchrun --nproc_per_node=4 examples/model_parallel.py --data 2 --schedule gpipe --check

Batches go through the ranks like goods on a belt, in micro-batches, so that all ranks work at the same time. With
--data 2, two such belts of half as many ranks each train on different images, and average their gradients. With
--check, rank 0 also trains the whole network by itself, and compares the losses. docs/parallel/model-parallel.md
explains it.
"""

from __future__ import annotations

import argparse
import copy

import common
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional
from torch.utils.data import DataLoader
from train import split_digits

import ourddp


def make_model() -> nn.Sequential:
    """Return a network from images (N, 1, 8, 8) to the logits of ten digits (N, 10)."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(64, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * 4 * 4, 256),
        nn.ReLU(),
        nn.Linear(256, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )


def train(args: argparse.Namespace, rank: int, ranks: int) -> None:
    """Train, and print the cut, the loss of each epoch and the accuracy on the held-out set."""
    mesh = init_device_mesh("cpu", (args.data, ranks // args.data), mesh_dim_names=("data", "pipe"))
    # Each step enlarges what was rounded in the steps before; in double precision --check can tell that from a mistake.
    dtype = torch.float64 if args.check else torch.float32
    training_set, held_out = split_digits(args.seed)
    torch.manual_seed(args.seed)  # the same order of images on all ranks
    loader = DataLoader(training_set, args.batch_size * args.data, shuffle=True, drop_last=True)
    first = mesh.get_local_rank("data") * args.batch_size
    share = slice(first, first + args.batch_size)  # of each batch, for this pipeline

    layers = make_model().to(dtype)
    alone = copy.deepcopy(layers) if args.check and rank == 0 else None
    model = ourddp.ModelParallel(
        layers,
        torch.zeros(args.batch_size, 1, 8, 8, dtype=dtype),
        functional.cross_entropy,
        schedule=args.schedule,
        micro_batches=args.micro_batches,
        balance=args.balance,
        group=mesh["pipe"],
        data_group=mesh["data"] if args.data > 1 else None,
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    if rank == 0:
        print(model.report())
    difference = 0.0
    reference = torch.optim.SGD(alone.parameters(), lr=args.lr, momentum=0.9) if alone else None
    for epoch in range(args.epochs):
        total = 0.0
        for images, labels in loader:
            images = images.to(dtype)
            optimizer.zero_grad()
            loss = model.step(images[share], labels[share])  # forward and backward of this batch
            optimizer.step()
            total += loss
            if alone and reference:
                reference.zero_grad()
                expected = functional.cross_entropy(alone(images), labels)
                expected.backward()
                reference.step()
                difference = max(difference, abs(loss - expected.item()))
        if rank == 0:
            print(f"epoch {epoch + 1:3d}  loss {total / len(loader):.4f}", flush=True)

    images, labels = next(iter(DataLoader(held_out, len(held_out))))
    logits = model(images.to(dtype), everywhere=True)
    if rank == 0:
        if alone:
            print(f"largest difference to the losses of one process: {difference:.1e}")
        print(f"held-out accuracy: {(logits.argmax(-1) == labels).float().mean():.2%}")


def main() -> None:
    """Read the command line and train."""
    parser = common.small_parser(__doc__.splitlines()[0], epochs=10, batch_size=32, lr=0.05)
    parser.add_argument("--schedule", choices=("gpipe", "1f1b", "interleaved"), default="1f1b")
    parser.add_argument("--micro-batches", type=int, default=4, help="parts of a batch, which follow each other")
    parser.add_argument("--balance", choices=("time", "memory"), default="time", help="what the cut makes equal")
    parser.add_argument("--data", type=int, default=1, help="pipelines side by side, each with its own images")
    parser.add_argument("--check", action="store_true", help="compare the losses with those of one process")
    args = common.parse(parser)
    with common.process_group(args.backend) as (rank, ranks):
        if args.data < 1 or ranks % args.data:
            raise common.Refused(f"--data {args.data} does not divide {ranks} ranks: choose a number that does")
        train(args, rank, ranks)


if __name__ == "__main__":
    main()
