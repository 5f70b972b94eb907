"""Trains the network of train.py in Horovod's style: the optimizer is wrapped, and the model is not.

    torchrun --nproc_per_node=4 examples/horovod_style.py
    mpirun -n 4 python examples/horovod_style.py

The line `import ourddp as hvd` is all that a program for Horovod has to change for what is used here;
docs/from-horovod.md has the rest. The learning rate is scaled by the number of ranks, as in train.py.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import common
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, DistributedSampler, Subset
from train import make_model, split_digits

import ourddp as hvd


@torch.no_grad()
def evaluate(model: nn.Module, held_out: Subset) -> dict[str, float]:
    """Return loss and accuracy over the held-out set, of which each rank looks at its own share."""
    model.eval()
    images, labels = next(iter(DataLoader(Subset(held_out, range(hvd.rank(), len(held_out), hvd.size())), 1000)))
    logits = model(images)
    own = {
        "loss": functional.cross_entropy(logits, labels),
        "accuracy": (logits.argmax(-1) == labels).float().mean(),
    }
    return hvd.average_metrics(own, weights=len(labels))


def train(args: argparse.Namespace) -> None:
    """Train, and print each epoch's metrics on rank 0."""
    torch.manual_seed(args.seed + hvd.rank())  # every rank begins with weights of its own
    training_set, held_out = split_digits(args.seed)
    sampler = DistributedSampler(training_set, hvd.size(), hvd.rank(), seed=args.seed)
    loader = DataLoader(training_set, args.batch_size, sampler=sampler)
    model = make_model()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9),
        named_parameters=model.named_parameters(),
        compression=hvd.Compression[args.compression],
    )
    steps = args.epochs * len(loader)
    schedule = hvd.LinearScalingLR(
        optimizer,
        warmup_steps=args.warmup_epochs * len(loader),
        decay=lambda step: 0.5 * (1 + math.cos(math.pi * step / steps)),
    )
    first_epoch = 0
    checkpointer = hvd.Checkpointer(args.checkpoint, keep=2, mode="max") if args.checkpoint else None
    if checkpointer and args.resume:
        last = checkpointer.load(model, optimizer, schedule=schedule)
        first_epoch = 0 if last is None else last + 1
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)

    for epoch in range(first_epoch, args.epochs):
        sampler.set_epoch(epoch)
        common.seed_epoch(args.seed, epoch)
        model.train()
        for images, labels in loader:
            optimizer.zero_grad()
            functional.cross_entropy(model(images), labels).backward()  # gradients are averaged while this runs
            optimizer.synchronize()
            nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            with optimizer.skip_synchronize():
                optimizer.step()
            schedule.step()
        metrics = evaluate(model, held_out)
        if checkpointer:
            checkpointer.save(epoch, model, optimizer, schedule=schedule, metric=metrics["accuracy"])
        if hvd.rank() == 0:
            print(f"epoch {epoch + 1}: loss {metrics['loss']:.4f}, accuracy {metrics['accuracy']:.2%}", flush=True)


def main() -> None:
    """Read the command line and train."""
    parser = common.small_parser(__doc__.splitlines()[0], epochs=15, batch_size=16, lr=0.04)
    parser.add_argument("--warmup-epochs", type=int, default=3, help="epochs in which the rate rises from --lr")
    parser.add_argument("--compression", choices=hvd.Compression.__members__, default="none", help="of gradients")
    parser.add_argument("--checkpoint", type=Path, metavar="FOLDER", help="folder for the last and the best checkpoint")
    parser.add_argument("--resume", action="store_true", help="go on from the last one in --checkpoint")
    args = common.parse(parser)
    with common.process_group(args.backend):
        train(args)


if __name__ == "__main__":
    main()
