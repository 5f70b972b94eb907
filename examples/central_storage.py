"""Trains on handwritten digits with all parameters kept at one rank, as TensorFlow's CentralStorageStrategy does.

    torchrun --nproc_per_node=4 examples/central_storage.py

Rank 0 keeps the parameters and the state of the optimizer. For each step it broadcasts the parameters to all ranks, and
gets the sum of their gradients, which reduce() adds up on the way. The numbers are those of data-parallel training, and
so are the bytes; but rank 0 takes the step for all, while the others wait.
"""

from __future__ import annotations

import argparse

import common
import torch
import torch.distributed as dist
import ways
from torch import nn
from torch.nn import functional
from torch.nn.utils import parameters_to_vector, vector_to_parameters


def make_step(args: argparse.Namespace, rank: int, ranks: int, model: nn.Module) -> ways.Step:
    """Return the function that takes a step with this rank's part of a batch."""
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr) if rank == 0 else None

    def step(images: torch.Tensor, labels: torch.Tensor) -> float:
        with torch.no_grad():
            parameters = parameters_to_vector(model.parameters())
            dist.broadcast(parameters, src=0)
            vector_to_parameters(parameters, model.parameters())
        model.zero_grad()
        loss = functional.cross_entropy(model(images), labels)
        loss.backward()
        gradient = parameters_to_vector(parameter.grad for parameter in model.parameters())
        dist.reduce(gradient, dst=0)
        if optimizer is not None:
            mean = gradient / ranks
            for parameter in model.parameters():
                part, mean = mean.split([parameter.numel(), mean.numel() - parameter.numel()])
                parameter.grad = part.view_as(parameter)
            optimizer.step()
        return loss.item()

    return step


def main() -> None:
    """Read the command line and train."""
    args = ways.argument_parser(__doc__.splitlines()[0]).parse_args()
    with common.process_group(args.backend) as (rank, ranks):
        ways.check_batch(args, ranks)
        model = ways.model(args.seed)
        step = make_step(args, rank, ranks, model)
        for batch in ways.batches(args):
            loss = step(*ways.share(batch, rank, ranks))
        ways.finish(args, rank, loss, model)


if __name__ == "__main__":
    main()
