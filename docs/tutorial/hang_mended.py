"""The program of hang.py, with the decision to stop made by all ranks. torchrun --nproc_per_node=4 hang_mended.py"""

import datetime
import faulthandler
import signal

import torch
import torch.distributed as dist
from torch import nn

import ourddp

faulthandler.register(signal.SIGUSR1, all_threads=False)  # `kill -USR1 PID` prints where the process is

launch = ourddp.init(timeout=datetime.timedelta(seconds=10))
everybody = dist.new_group(timeout=datetime.timedelta(minutes=30))  # for the barrier before the results are written
torch.manual_seed(18 + launch.rank)  # every rank has data of its own

model = ourddp.DistributedDataParallel(nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
for step in range(200):
    inputs = torch.randn(32, 16)
    optimizer.zero_grad()
    loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
    loss.backward()
    optimizer.step()
    worst = loss.detach()
    dist.all_reduce(worst, dist.ReduceOp.MAX)  # the same number on all ranks, and so the same decision
    if worst.item() < 0.01:  # good enough
        break

dist.barrier(group=everybody)
if launch.rank == 0:
    print(f"done after {step + 1} steps")
dist.destroy_process_group()
