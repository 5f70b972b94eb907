"""Trains on handwritten digits, and goes on in the midst of an epoch when a rank has died.

    torchrun --nproc_per_node=2 --max_restarts=3 examples/resume.py --folder checkpoints --die 40

Every few steps all that the training depends on is saved: model, optimizer, schedule, random numbers, and how far the
epoch is. torchrun starts all ranks again when one fails, and they go on from the last checkpoint. The last line, with
the loss and a digest of the parameters, is that of a training in which nobody died. `--die` kills the last rank in that
step, once.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import signal
from pathlib import Path

import common
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader
from train import BATCH, make_model, split_digits

import ourddp


def digest(model: nn.Module) -> str:
    """Return 16 characters that are others if any bit of a parameter is another."""
    hashed = hashlib.sha256()
    for parameter in model.parameters():
        hashed.update(parameter.detach().numpy().tobytes())
    return hashed.hexdigest()[:16]


def is_first_attempt() -> bool:
    """Return whether torchrun has not started the ranks again."""
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"


def train(args: argparse.Namespace, rank: int, ranks: int) -> None:
    """Train, or go on with a training, and print what came out."""
    torch.manual_seed(args.seed)
    training_set, _ = split_digits(args.seed)
    sampler = ourddp.ResumableSampler(training_set, seed=args.seed)
    # With a generator of its own a loader leaves alone the random numbers that dropout uses.
    loader = DataLoader(training_set, args.batch_size, sampler=sampler, generator=torch.Generator())
    model = ourddp.DistributedDataParallel(make_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs * len(loader))
    torch.manual_seed(args.seed * ranks + rank)  # every rank drops other activations
    state = {"schedule": schedule, "sampler": sampler, "random": ourddp.RandomState()}
    checkpointer = ourddp.Checkpointer(args.folder, keep=2)
    step = checkpointer.load(model, optimizer, **state) or 0
    if rank == 0 and step > 0:
        print(f"resumed after step {step}, sample {sampler.position} of epoch {sampler.epoch + 1}", flush=True)
    loss = torch.zeros(())
    for epoch in range(sampler.epoch, args.epochs):
        sampler.set_epoch(epoch)
        for images, labels in loader:
            if step == args.die and rank == ranks - 1 and is_first_attempt():
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            schedule.step()
            sampler.advance(len(labels))
            step += 1
            if step % args.save_every == 0:
                checkpointer.save(step, model, optimizer, **state)
    if rank == 0:
        print(f"{step} steps, loss {loss.item():.9f}, parameters {digest(model)}", flush=True)


def main() -> None:
    """Read the command line and train."""
    parser = common.small_parser(__doc__.splitlines()[0], epochs=3, batch_size=BATCH, lr=0.04)
    parser.add_argument("--folder", type=Path, required=True, help="of the checkpoints; all ranks have to see it")
    parser.add_argument("--save-every", type=int, default=15, metavar="STEPS")
    parser.add_argument("--die", type=int, metavar="STEP", help="kill the last rank in this step, once")
    args = common.parse(parser)
    with common.process_group(args.backend) as (rank, ranks):
        train(args, rank, ranks)


if __name__ == "__main__":
    main()
