"""Trains on handwritten digits with DeepSpeed, and gradients and optimizer cut over the ranks (ZeRO).

    torchrun --nproc_per_node=2 examples/libraries/deepspeed_zero.py
    torchrun --nproc_per_node=2 examples/libraries/deepspeed_zero.py --stage 3

DeepSpeed passes the name of the backend on to torch, which finds ours among the installed packages.
"""

from __future__ import annotations

import deepspeed
import digits
import torch
import torch.distributed as dist
from torch.nn import functional


def main() -> None:
    """Read the command line and train."""
    parser = digits.argument_parser(__doc__.splitlines()[0])
    parser.add_argument("--stage", type=int, choices=(0, 1, 2, 3), default=2, help="of ZeRO: how much is cut")
    args = digits.parse(parser)
    # Otherwise it spends minutes on compiling an all-reduce of its own, which only inference calls.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend=args.backend)
    config = {
        "train_micro_batch_size_per_gpu": args.batch_size // dist.get_world_size(),
        "zero_optimization": {"stage": args.stage},
        "zero_allow_untested_optimizer": True,  # it has tested its own, and Adam
        "gradient_clipping": 0.0,  # it would clip to 1.0
    }
    model = digits.model(args.seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    for images, labels in digits.shares(args):
        loss = functional.cross_entropy(engine(images), labels)
        engine.backward(loss)
        engine.step()
    with deepspeed.zero.GatheredParameters(list(model.parameters())):  # changes nothing below stage 3
        digits.finish(args, loss, model)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
