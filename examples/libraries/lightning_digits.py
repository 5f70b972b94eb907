"""Trains on handwritten digits with Lightning's Trainer.

    torchrun --nproc_per_node=2 examples/libraries/lightning_digits.py
    torchrun --nproc_per_node=2 examples/libraries/lightning_digits.py --ddp torch

Lightning's DDPStrategy takes the name of the backend. It makes the DistributedDataParallel in one method, which a
strategy of one's own can replace by ours.
"""

from __future__ import annotations

import os
from typing import Any

import digits
import lightning
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.nn import functional

import ourddp


class OursStrategy(DDPStrategy):
    """Trains with our DistributedDataParallel."""

    def _setup_model(self, model: nn.Module) -> ourddp.DistributedDataParallel:
        return ourddp.DistributedDataParallel(model, device_ids=self.determine_ddp_device_ids(), **self._ddp_kwargs)

    def teardown(self) -> None:
        """Print what communication cost the last backward, before Lightning lets go of the DistributedDataParallel."""
        if self.is_global_zero and isinstance(self.model, ourddp.DistributedDataParallel):
            print(self.model.report())
        super().teardown()


class Digits(lightning.LightningModule):
    """The network, its loss and its optimizer."""

    def __init__(self, seed: int, rate: float) -> None:
        super().__init__()
        self.model, self.rate = digits.model(seed), rate

    def training_step(self, batch: list[torch.Tensor], _index: int) -> torch.Tensor:
        """Return the loss of this rank's batch."""
        images, labels = batch
        self.last_loss = functional.cross_entropy(self.model(images), labels)
        return self.last_loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer."""
        return torch.optim.SGD(self.parameters(), lr=self.rate)


def main() -> None:
    """Read the command line and train."""
    parser = digits.argument_parser(__doc__.splitlines()[0])
    parser.add_argument("--ddp", choices=("ours", "torch"), default="ours", help="whose DistributedDataParallel")
    args = digits.parse(parser)
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    strategy = OursStrategy if args.ddp == "ours" else DDPStrategy
    quiet: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=ranks,  # of this machine; num_nodes has the number of machines
        strategy=strategy(process_group_backend=args.backend),
        max_steps=args.steps,
        enable_model_summary=False,
        **quiet,
    )
    module = Digits(args.seed, args.lr)
    trainer.fit(module, digits.loader(args, ranks))
    digits.finish(args, module.last_loss, module.model)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
