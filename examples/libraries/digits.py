"""What the programs of this folder share: flags, the digits and the network of the other examples, and the last line.

The programs train on the CPU, without dropout, so that their losses over two backends can be compared.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

sys.path.append(str(Path(__file__).resolve().parents[1]))
import ways
from train import split_digits

Predict = Callable[[torch.Tensor], torch.Tensor]

model, argument_parser = ways.model, ways.argument_parser


def parse(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Return the command line; give each rank its share of the cores."""
    args = parser.parse_args()
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))
    return args


def loader(args: argparse.Namespace, ranks: int) -> DataLoader:
    """Return all of the training set in a rank's share of --batch-size; the library is to divide it over the ranks."""
    training_set, _ = split_digits(args.seed)
    generator = torch.Generator().manual_seed(args.seed)
    return DataLoader(training_set, args.batch_size // ranks, shuffle=True, drop_last=True, generator=generator)


def shares(args: argparse.Namespace) -> Iterator[ways.Batch]:
    """Yield this rank's part of each of --steps batches."""
    for batch in ways.batches(args):
        yield ways.share(batch, dist.get_rank(), dist.get_world_size())


def repeated(batches: DataLoader, steps: int) -> Iterator[ways.Batch]:
    """Yield --steps batches, over as many epochs as that takes."""
    endless = itertools.chain.from_iterable(itertools.repeat(batches))
    return itertools.islice(endless, steps)


def finish(args: argparse.Namespace, loss: torch.Tensor, trained: nn.Module, predict: Predict | None = None) -> None:
    """Let rank 0 print the backend, the last loss as a mean over ranks, and which part of held-out digits is right.

    `predict` returns the logits of images, where `trained` itself does not.

    Raises RuntimeError if the ranks' weights differ, as they do where a library has let each rank train alone.
    """
    weights = nn.utils.parameters_to_vector(trained.parameters()).detach()
    first = weights.clone()
    dist.broadcast(first, 0)
    if not torch.equal(weights, first):
        raise RuntimeError(f"rank {dist.get_rank()} has other weights than rank 0: no gradients were averaged")
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    mean /= dist.get_world_size()
    if dist.get_rank() == 0:
        accuracy = ways.accuracy(predict or trained, args.seed)
        print(f"backend {dist.get_backend()}, loss {mean:.6f}, held-out accuracy {accuracy:.2%}", flush=True)
