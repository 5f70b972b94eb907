"""Trains the GPT of train_gpt.py on sequences of unequal length, and compares its gradients with those of one process.

    torchrun --nproc_per_node=4 examples/weighted.py

Each rank packs sequences into a batch of as many bytes as it likes, so that ranks have unequal numbers of bytes to
predict. The mean of the ranks' mean losses would count a byte of a short batch more than one of a long batch. With
set_weight() every byte counts the same: the gradients are those of one process that has all sequences. Rank 0 computes
these too, in some steps, and prints how far both ways are from them.
"""

from __future__ import annotations

import argparse
import copy

import common
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from train_gpt import GPT, read_corpus

import ourddp

PADDING = -100  # what cross_entropy leaves out


def pack(text: torch.Tensor, context: int, most: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Return up to `most` sequences of unequal length: bytes, and the bytes that follow, both (most, context).

    Where a sequence has ended there is padding. A batch may have no sequence at all.
    """
    bytes_, following = torch.zeros(most, context, dtype=torch.long), torch.full((most, context), PADDING)
    for row in range(int(torch.randint(most + 1, (), generator=generator))):
        length = int(torch.randint(1, context + 1, (), generator=generator))
        begin = int(torch.randint(len(text) - length, (), generator=generator))
        bytes_[row, :length] = text[begin : begin + length]
        following[row, :length] = text[begin + 1 : begin + length + 1]
    return bytes_, following


def sum_of_losses(logits: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
    """Return the sum of the cross-entropies in nats, 0-dim, over the bytes that are no padding."""
    return functional.cross_entropy(logits.flatten(0, 1), following.flatten(), ignore_index=PADDING, reduction="sum")


def distances(model: nn.Module, batches: list[tuple[torch.Tensor, torch.Tensor]]) -> list[float]:
    """Return how far the model's gradients, and averages of the ranks' means, are from those of one process."""
    counts = [int((following != PADDING).sum()) for _, following in batches]
    alone, means = copy.deepcopy(model), copy.deepcopy(model)
    for other, divisors in ((alone, [sum(counts)] * len(counts)), (means, [max(n, 1) * len(counts) for n in counts])):
        other.zero_grad()
        for (bytes_, following), divisor in zip(batches, divisors, strict=True):
            (sum_of_losses(other(bytes_), following) / divisor).backward()
    expected = flat_gradient(alone)
    return [float((flat_gradient(other) - expected).norm() / expected.norm()) for other in (model, means)]


def flat_gradient(model: nn.Module) -> torch.Tensor:
    """Return all gradients in one dimension, as float64."""
    return torch.cat([parameter.grad.flatten().double() for parameter in model.parameters()])


def train(args: argparse.Namespace, rank: int, ranks: int) -> None:
    """Train, and print the loss and the distances of gradients every few steps."""
    torch.manual_seed(args.seed)
    text = read_corpus(args.corpus)
    model = GPT(args.context, args.width, args.layers, args.heads)
    parallel = ourddp.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    for step in range(args.steps):
        # All ranks could make all batches, so that rank 0 can compare; each one trains on its own.
        generator = torch.Generator().manual_seed(args.seed * 1_000_003 + step)
        batches = [pack(text, args.context, args.batch_size, generator) for _ in range(ranks)]
        bytes_, following = batches[rank]
        optimizer.zero_grad()
        count = int((following != PADDING).sum())
        parallel.set_weight(count)
        loss = sum_of_losses(parallel(bytes_), following)
        loss.backward()
        totals = torch.tensor([loss.item(), count], dtype=torch.float64)
        dist.all_reduce(totals)
        if step % args.compare_every == 0 and totals[1] > 0 and rank == 0:
            weighted, means = distances(model, batches)
            print(
                f"step {step}: loss {totals[0] / totals[1]:.3f} over {int(totals[1])} bytes, {count} of them here; "
                f"gradients differ from one process's by {weighted:.1e}, the mean of means by {means:.1e}",
                flush=True,
            )
        optimizer.step()
    dist.barrier()  # no rank leaves while rank 0 still compares


def main() -> None:
    """Read the command line and train."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--backend", default="ours", help="what init_process_group gets: ours, gloo, cpu:ours, ...")
    parser.add_argument("--steps", type=int, default=101)
    parser.add_argument("--batch-size", type=int, default=8, help="most sequences per rank and step")
    parser.add_argument("--lr", type=float, default=3e-3, help="learning rate")
    parser.add_argument("--seed", type=int, default=0, help="of the first weights and the sequences")
    parser.add_argument("--compare-every", type=int, default=20, metavar="N", help="steps between comparisons")
    parser.add_argument("--corpus", type=int, default=400_000, help="bytes of text")
    parser.add_argument("--context", type=int, default=128, help="bytes of the longest sequence")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--heads", type=int, default=4)
    args = parser.parse_args()
    with common.process_group(args.backend) as (rank, ranks):
        train(args, rank, ranks)


if __name__ == "__main__":
    main()
