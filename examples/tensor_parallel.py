"""Trains a network on handwritten digits whose layers are cut into slices: each rank has a part of every layer.

    torchrun --nproc_per_node=4 examples/tensor_parallel.py
    torchrun --nproc_per_node=4 examples/tensor_parallel.py --tensor 2 --data 2 --check

The parts are torch's own: DTensor holds the slices of a weight, and parallelize_module says which way each layer is cut
(Shoeybi et al., Megatron-LM, 2019, https://arxiv.org/abs/1909.08053). With --data 2, there are two such networks that
train on different images; fully_shard averages their gradients, and cuts their weights once more. With --check, rank 0
also trains the whole network by itself, and compares the losses.
"""

from __future__ import annotations

import argparse
import copy

import common
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional
from torch.utils.data import DataLoader
from train import split_digits

# A layer that is cut by its outputs gives each rank a slice of them. The next one is cut by its inputs, so it needs
# only that slice, and adding up what the ranks get is its one all-reduce. The ReLU between them works on slices.
CUTS = {"1": ColwiseParallel(), "3": RowwiseParallel(), "5": ColwiseParallel(), "7": RowwiseParallel()}


def make_model() -> nn.Sequential:
    """Return a network from images (N, 1, 8, 8) to the log-probabilities of ten digits (N, 10)."""
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(64, 512),
        nn.ReLU(),
        nn.Linear(512, 128),
        nn.ReLU(),
        nn.Linear(128, 512),
        nn.ReLU(),
        nn.Linear(512, 10),
        nn.LogSoftmax(1),
    )


def train(args: argparse.Namespace, rank: int) -> None:
    """Train, and print the loss of each epoch and the accuracy on the held-out set."""
    mesh = init_device_mesh("cpu", (args.data, args.tensor), mesh_dim_names=("data", "tensor"))
    # Each step enlarges what was rounded in the steps before; in double precision --check can tell that from a mistake.
    dtype = torch.float64 if args.check else torch.float32
    training_set, held_out = split_digits(args.seed)
    torch.manual_seed(args.seed)  # the same first weights and order of images on all ranks
    loader = DataLoader(training_set, args.batch_size * args.data, shuffle=True, drop_last=True)
    first = mesh.get_local_rank("data") * args.batch_size
    share = slice(first, first + args.batch_size)  # of each batch; the same for all slices of a network

    model = make_model().to(dtype)
    alone = copy.deepcopy(model) if args.check and rank == 0 else None
    whole = sum(parameter.numel() for parameter in model.parameters())
    parallelize_module(model, mesh["tensor"], CUTS)
    if args.data > 1:
        # DistributedDataParallel refuses slices, which are DTensors; fully_shard is made to be combined with them.
        fully_shard(model, mesh=mesh["data"])
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    if rank == 0:
        own = sum(parameter.to_local().numel() for parameter in model.parameters())
        print(f"rank 0 has {own:,} of {whole:,} weights")
    difference = 0.0
    reference = torch.optim.SGD(alone.parameters(), lr=args.lr, momentum=0.9) if alone else None
    for epoch in range(args.epochs):
        total = 0.0
        for images, labels in loader:
            images = images.to(dtype)
            optimizer.zero_grad()
            loss = functional.nll_loss(model(images[share]), labels[share])
            loss.backward()
            optimizer.step()
            mean = loss.detach()
            dist.all_reduce(mean, group=mesh["data"].get_group())
            mean /= args.data
            total += mean.item()
            if alone and reference:
                reference.zero_grad()
                expected = functional.nll_loss(alone(images), labels)
                expected.backward()
                reference.step()
                difference = max(difference, abs(mean.item() - expected.item()))
        if rank == 0:
            print(f"epoch {epoch + 1:3d}  loss {total / len(loader):.4f}", flush=True)

    images, labels = next(iter(DataLoader(held_out, len(held_out))))
    with torch.no_grad():
        accuracy = (model(images.to(dtype)).argmax(-1) == labels).float().mean()
    if rank == 0:
        if alone:
            print(f"largest difference to the losses of one process: {difference:.1e}")
        print(f"held-out accuracy: {accuracy:.2%}")


def main() -> None:
    """Read the command line and train."""
    parser = common.small_parser(__doc__.splitlines()[0], epochs=10, batch_size=64, lr=0.1)
    parser.add_argument("--tensor", type=int, help="slices of each layer; by default as many as there are ranks")
    parser.add_argument("--data", type=int, default=1, help="networks side by side, each with its own images")
    parser.add_argument("--check", action="store_true", help="compare the losses with those of one process")
    args = common.parse(parser)
    with common.process_group(args.backend) as (rank, ranks):
        args.tensor = args.tensor or ranks // max(1, args.data)
        if args.tensor * args.data != ranks:
            raise common.Refused(f"--tensor {args.tensor} x --data {args.data} are not {ranks} ranks: make them so")
        train(args, rank)


if __name__ == "__main__":
    main()
