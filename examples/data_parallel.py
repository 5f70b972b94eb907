"""Trains on handwritten digits with replicas in the threads of one process, by ourddp.DataParallel.

    python examples/data_parallel.py --replicas 4

The gradients are those of data-parallel training by processes, but the replicas share one interpreter, and one device
sends and adds up everything. The program prints what that device moves in a step.
"""

from __future__ import annotations

import torch
import ways

import ourddp


def main() -> None:
    """Read the command line and train."""
    parser = ways.argument_parser(__doc__.splitlines()[0])
    parser.add_argument("--replicas", type=int, default=4)
    args = parser.parse_args()
    model = ourddp.DataParallel(ways.model(args.seed), ["cpu"] * args.replicas)
    step = ways.plain_step(model, torch.optim.SGD(model.parameters(), lr=args.lr))
    for batch in ways.batches(args):
        model.reset_transfers()
        loss = step(*batch)
    for kind, count in model.transfers.items():
        print(f"{kind:17} {count.tensors:3} tensors, {count.bytes:10,} bytes")
    ways.finish(args, 0, loss, model)


if __name__ == "__main__":
    main()
