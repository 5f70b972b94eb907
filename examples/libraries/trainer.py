"""Trains a small vision transformer on handwritten digits with the Trainer of Transformers.

    torchrun --nproc_per_node=2 examples/libraries/trainer.py
    torchrun --nproc_per_node=2 examples/libraries/trainer.py --ddp torch

The model is made from a configuration, so nothing is downloaded. On the CPU, the process group has to be there before
the Trainer's arguments, for the reason that accelerate_digits.py explains; on GPUs, they may name it instead, as
`ddp_backend="ours"`. The Trainer leaves a model alone that its method _wrap_model() has put into something.
"""

from __future__ import annotations

import tempfile
from typing import Any

import digits
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import Subset
from train import split_digits
from transformers import EvalPrediction, Trainer, TrainingArguments, ViTConfig, ViTForImageClassification

import ourddp


class OursTrainer(Trainer):
    """Trains with our DistributedDataParallel."""

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> nn.Module:
        wrapped = super()._wrap_model(model, training, dataloader)
        return ourddp.DistributedDataParallel(model) if training and wrapped is self.model else wrapped


def make_model(seed: int) -> nn.Module:
    """Return a transformer with two layers that looks at patches of 2x2 pixels."""
    torch.manual_seed(seed)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    images = {"image_size": 8, "patch_size": 2, "num_channels": 1, "num_labels": 10}
    return ViTForImageClassification(ViTConfig(**shape, **images))


def named(samples: Subset) -> list[dict[str, torch.Tensor]]:
    """Return images and labels under the names of the model's arguments."""
    return [{"pixel_values": image, "labels": label} for image, label in samples]


def accuracy(prediction: EvalPrediction) -> dict[str, float]:
    """Return which part of the logits, which the Trainer has gathered from all ranks, is right."""
    return {"accuracy": float((prediction.predictions.argmax(1) == prediction.label_ids).mean())}


def main() -> None:
    """Read the command line and train."""
    parser = digits.argument_parser(__doc__.splitlines()[0])
    parser.add_argument("--ddp", choices=("ours", "torch"), default="ours", help="whose DistributedDataParallel")
    parser.set_defaults(lr=3e-3)
    args = digits.parse(parser)
    ranks = ourddp.init(args.backend).world_size
    training_set, held_out = split_digits(args.seed)
    model = make_model(args.seed)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            use_cpu=True,
            max_steps=args.steps,
            per_device_train_batch_size=args.batch_size // ranks,
            learning_rate=args.lr,
            seed=args.seed,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        data = {"train_dataset": named(training_set), "eval_dataset": named(held_out)}
        trainer = (OursTrainer if args.ddp == "ours" else Trainer)(model, arguments, compute_metrics=accuracy, **data)
        loss = torch.tensor(trainer.train().training_loss)  # of all steps
        evaluated = trainer.evaluate()
    digits.finish(args, loss, model, lambda images: model(images).logits)
    if dist.get_rank() == 0:
        print(f"by the Trainer: accuracy {evaluated['eval_accuracy']:.2%}", flush=True)
        if args.ddp == "ours":
            print(trainer.model_wrapped.report())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
