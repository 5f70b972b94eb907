"""Trains a small GPT whose parameters, gradients and optimizer state are cut into shards over the ranks.

    torchrun --nproc_per_node=4 examples/sharded.py --way fsdp

With data-parallel training every rank keeps all parameters, gradients and state of the optimizer. With --way

- zero, torch's ZeroRedundancyOptimizer keeps on each rank the optimizer's state of a part of the parameters, whose step
  the rank takes for all (Rajbhandari et al., ZeRO, 2020, stage 1);
- fsdp, fully_shard() cuts the parameters and gradients as well, and gathers the parameters of a layer only while it
  runs (stage 3). Adam then keeps an N-th of 16 bytes a parameter on each of N ranks;
- ddp, nothing is cut, to compare with.

The losses are the same. --checkpoint DIR writes a distributed checkpoint, one file a rank, at the end, and begins with
the one that is there, also with another number of ranks.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Iterator
from pathlib import Path

import common
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.optim import Adam
from train_gpt import GPT, read_corpus

import ourddp

LENGTH = 64  # bytes that the model looks back on


def shard(way: str, model: nn.Module, ranks: int, rate: float) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return the model as its way trains it, and the optimizer."""
    if way == "fsdp":
        mesh = init_device_mesh("cpu", (ranks,))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)  # what is left, in one piece
        return model, Adam(model.parameters(), lr=rate)
    parallel = ourddp.DistributedDataParallel(model)
    if way == "zero":
        return parallel, ZeroRedundancyOptimizer(model.parameters(), optimizer_class=Adam, lr=rate)
    return parallel, Adam(model.parameters(), lr=rate)


def batches(args: argparse.Namespace, rank: int, ranks: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield --steps batches of this rank: bytes, and the bytes that follow them, (N, LENGTH) each."""
    text = read_corpus(args.corpus)
    generator = torch.Generator().manual_seed(args.seed)
    for _ in range(args.steps):
        starts = torch.randint(len(text) - LENGTH - 1, (args.batch_size,), generator=generator).chunk(ranks)[rank]
        windows = torch.stack([text[start : start + LENGTH + 1].long() for start in starts.tolist()])
        yield windows[:, :-1], windows[:, 1:]


def bytes_here(tensors: list[torch.Tensor]) -> int:
    """Return the bytes of what this rank keeps of tensors, some of which may be shards."""
    here = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    return sum(tensor.numel() * tensor.element_size() for tensor in here)


def memory(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """Return the bytes that this rank keeps between steps."""
    inner = optimizer.optim if isinstance(optimizer, ZeroRedundancyOptimizer) else optimizer
    parameters = list(model.parameters())
    return {
        "parameters": bytes_here(parameters),
        "gradients": bytes_here([parameter.grad for parameter in parameters if parameter.grad is not None]),
        "optimizer": bytes_here([value for state in inner.state.values() for value in state.values()]),
    }


def checkpointed(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, object]:
    """Return the states of both, under names that do not depend on how they are cut."""
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optimizer": optimizer_state}


def train(args: argparse.Namespace, rank: int, ranks: int) -> None:
    """Train; print the loss and what every rank keeps."""
    torch.manual_seed(args.seed)
    model, optimizer = shard(args.way, GPT(LENGTH, args.width, layers=2, heads=4), ranks, args.lr)
    if args.checkpoint and args.checkpoint.exists():
        state = checkpointed(model, optimizer)
        dcp.load(state, checkpoint_id=args.checkpoint)
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    for text, following in batches(args, rank, ranks):
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(text).flatten(0, 1), following.flatten())
        loss.backward()
        optimizer.step()
    if args.checkpoint:
        # The old one is meant to be replaced.
        warnings.filterwarnings("ignore", "Detected an existing checkpoint")
        writer = dcp.FileSystemWriter(args.checkpoint, overwrite=True)
        dcp.save(checkpointed(model, optimizer), storage_writer=writer)
    mean = loss.detach()
    dist.all_reduce(mean, dist.ReduceOp.AVG)
    kept = memory(model, optimizer)
    if rank == 0:
        print(f"loss {mean.item():.6f}")
        print(", ".join(f"{name} {size:,} bytes" for name, size in kept.items()), "on this rank", flush=True)


def main() -> None:
    """Read the command line and train."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default="ours", help="what init_process_group gets")
    parser.add_argument("--way", choices=("ddp", "zero", "fsdp"), default="fsdp")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch-size", type=int, default=16, help="windows of text in a step, of all ranks together")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--corpus", type=int, default=400_000, help="bytes of text")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--checkpoint", type=Path, metavar="DIR", help="begin with this checkpoint, and write it again")
    args = parser.parse_args()
    with common.process_group(args.backend) as (rank, ranks):
        if args.batch_size % ranks:
            raise common.Refused(f"--batch-size {args.batch_size} is not a multiple of {ranks} ranks")
        if args.way == "zero" and args.checkpoint:
            raise common.Refused("torch writes no distributed checkpoint of ZeroRedundancyOptimizer: use --way fsdp")
        train(args, rank, ranks)


if __name__ == "__main__":
    main()
