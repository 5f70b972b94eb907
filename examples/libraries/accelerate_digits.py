"""Trains on handwritten digits with Accelerate, and micro-batches that add up to one step.

    torchrun --nproc_per_node=2 examples/libraries/accelerate_digits.py
    torchrun --nproc_per_node=2 examples/libraries/accelerate_digits.py --ddp torch

On the CPU, Accelerate asks for Gloo whatever it is told, but takes a process group that is there already. So the group
comes first. prepare() would put the model into torch's DistributedDataParallel; a model that is in ours already is
kept away from it.
"""

from __future__ import annotations

import digits
import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch.nn import functional

import ourddp


def main() -> None:
    """Read the command line and train."""
    parser = digits.argument_parser(__doc__.splitlines()[0])
    parser.add_argument("--ddp", choices=("ours", "torch"), default="ours", help="whose DistributedDataParallel")
    args = digits.parse(parser)
    ranks = ourddp.init(args.backend).world_size
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = digits.model(args.seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
    model = ourddp.DistributedDataParallel(model) if args.ddp == "ours" else accelerator.prepare(model)
    optimizer, loader = accelerator.prepare(optimizer, digits.loader(args, ranks))
    for images, labels in digits.repeated(loader, args.steps):
        with accelerator.accumulate(model):
            loss = functional.cross_entropy(model(images), labels)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    digits.finish(args, loss, accelerator.unwrap_model(model))
    if args.ddp == "ours" and accelerator.is_main_process:
        print(model.report())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
