"""Tries learning rates and batch sizes on handwritten digits, with a process group of two ranks for each trial.

    python examples/sweep.py --lr 0.05 0.2 0.8 --batch-size 24 96 --processes 4

No torchrun: the program starts the ranks, as many trials at a time as --processes have room for. The trials see equally
many samples, so large batches take fewer steps.
"""

from __future__ import annotations

import argparse
import functools
from typing import Any

import torch
import torch.distributed as dist
import ways

import ourddp


def train(args: argparse.Namespace, trial: ourddp.Trial) -> dict[str, float]:
    """Train with the parameters of a trial, as one of its ranks; return what becomes columns of the table."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    size = trial["batch size"]
    model = ourddp.DistributedDataParallel(ways.model(args.seed))
    step = ways.plain_step(model, torch.optim.SGD(model.parameters(), lr=trial["lr"]))
    for batch in ways.batches(argparse.Namespace(steps=args.samples // size, batch_size=size, seed=args.seed)):
        loss = step(*ways.share(batch, rank, ranks))
    return {"loss": loss, "accuracy": ways.accuracy(model, args.seed)}


def report(row: dict[str, Any]) -> None:
    """Print how a trial has ended."""
    print(f"trial {row['trial']}: {row['error'] or format(row['accuracy'], '.2%')}", flush=True)


def main() -> None:
    """Read the command line, run the trials and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--lr", type=float, nargs="+", default=[0.05, 0.2, 0.8], help="learning rates")
    parser.add_argument("--batch-size", type=int, nargs="+", default=[24, 96], help="of the ranks of a trial together")
    parser.add_argument("--samples", type=int, default=12000, help="that each trial trains with")
    parser.add_argument("--seed", type=int, default=0, help="of the first weights, and of the order of samples")
    parser.add_argument("--ranks", type=int, default=2, help="of each trial")
    parser.add_argument("--processes", type=int, help="at a time; by default one for each core")
    parser.add_argument("--timeout", type=float, help="seconds after which a trial has failed")
    parser.add_argument("--backend", default="ours", help="what init_process_group gets")
    args = parser.parse_args()
    table = ourddp.sweep(
        functools.partial(train, args),
        {"lr": args.lr, "batch size": args.batch_size},
        ranks=args.ranks,
        processes=args.processes,
        timeout=args.timeout,
        backend=args.backend,
        each=report,
    )
    print(table.to_markdown())
    if finished := [row for row in table if not row["error"]]:
        best = max(finished, key=lambda row: row["accuracy"])
        print(f"the best: --lr {best['lr']} --batch-size {best['batch size']}")


if __name__ == "__main__":
    main()
