"""Trains on handwritten digits with ranks that train alone and now and then average their parameters.

    torchrun --nproc_per_node=4 examples/local_sgd.py --way periodic --period 8

Data-parallel ranks meet in every step. Here every rank takes steps of its own, and with --way

- periodic, all ranks average their parameters in every --period steps (Stich, Local SGD Converges Fast and Communicates
  Little, 2018). That is a --period-th of the bytes.
- gossip, every rank averages with one other rank in each step, and after some steps with each (Lian et al., Can
  Decentralized Algorithms Outperform Centralized Algorithms?, 2017). A rank waits for one other, not for all.

In the end all ranks have the mean of their models. The losses are not those of one process, but they get as low: see
docs/parallel/servers.md.
"""

from __future__ import annotations

import argparse

import common
import torch
import torch.distributed as dist
import ways
from torch import nn
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.algorithms.model_averaging.utils import average_parameters
from torch.nn import functional
from torch.nn.utils import parameters_to_vector, vector_to_parameters


def partner_of(rank: int, ranks: int, step: int) -> int:
    """Return which rank a rank averages with in a step, which may be itself: in `ranks` steps it meets every rank.

    This is the circle method of round-robin tournaments: two ranks meet if their sum is the step's number.
    """
    return (step - rank) % ranks


@torch.no_grad()
def average_with(partner: int, model: nn.Module) -> None:
    """Replace the parameters here and at the partner by their mean."""
    if partner == dist.get_rank():
        return
    mine = parameters_to_vector(model.parameters())
    others = torch.empty_like(mine)
    for work in dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, mine, partner), dist.P2POp(dist.irecv, others, partner)]
    ):
        work.wait()
    vector_to_parameters((mine + others) / 2, model.parameters())


def make_step(args: argparse.Namespace, rank: int, ranks: int, model: nn.Module) -> ways.Step:
    """Return the function that takes this rank's step with its part of a batch, and averages where it is time to."""
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
    averager = PeriodicModelAverager(period=args.period, warmup_steps=0)
    steps = iter(range(args.steps))

    def step(images: torch.Tensor, labels: torch.Tensor) -> float:
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        if args.way == "periodic":
            averager.average_parameters(model.parameters())
        else:
            average_with(partner_of(rank, ranks, next(steps)), model)
        return loss.item()

    return step


def train(args: argparse.Namespace, rank: int, ranks: int) -> tuple[float, nn.Module]:
    """Return this rank's last loss, and the mean of all ranks' models."""
    model = ways.model(args.seed)
    step = make_step(args, rank, ranks, model)
    for batch in ways.batches(args):
        loss = step(*ways.share(batch, rank, ranks))
    average_parameters(model.parameters(), dist.group.WORLD)
    return loss, model


def main() -> None:
    """Read the command line and train."""
    parser = ways.argument_parser(__doc__.splitlines()[0])
    parser.add_argument("--way", choices=("periodic", "gossip"), default="periodic")
    parser.add_argument("--period", type=int, default=8, help="steps between averages, with --way periodic")
    args = parser.parse_args()
    with common.process_group(args.backend) as (rank, ranks):
        ways.check_batch(args, ranks)
        ways.finish(args, rank, *train(args, rank, ranks))


if __name__ == "__main__":
    main()
