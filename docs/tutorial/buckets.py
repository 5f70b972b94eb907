"""Prints where the time of a backward goes, with one bucket and with many: torchrun --nproc_per_node=2 buckets.py"""

import torch
import torch.distributed as dist
from torch import nn

import ourddp

launch = ourddp.init()
torch.manual_seed(0)
torch.set_num_threads(1)


def train(bucket_cap_mb: float) -> None:
    """Take ten steps, and print the report on the last one."""
    network = nn.Sequential(*[layer for _ in range(8) for layer in (nn.Linear(512, 512), nn.ReLU())])
    model = ourddp.DistributedDataParallel(network, bucket_cap_mb=bucket_cap_mb)
    for _ in range(10):
        model.zero_grad()
        model(torch.randn(256, 512)).square().mean().backward()
    if launch.rank == 0:
        print(model.report(), end="\n\n")


train(100)  # all gradients in one bucket
train(2)  # two layers to a bucket
dist.destroy_process_group()
