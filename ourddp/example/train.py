"""Trains a small network on handwritten digits: torchrun --nproc_per_node=4 train.py"""

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional

import ourddp

launch = ourddp.init()  # joins the job that torchrun, mpirun or srun started
torch.manual_seed(0)  # the same shuffles on all ranks; their models are made equal by DistributedDataParallel

digits = load_digits()  # 1,797 images of 8x8 pixels, which scikit-learn ships
images = torch.tensor(digits.data, dtype=torch.float32) / 16
labels = torch.tensor(digits.target)
train, held_out = torch.randperm(len(images)).split([1437, 360])

network = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
model = ourddp.DistributedDataParallel(network)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

for epoch in range(10):
    shuffled = train[torch.randperm(len(train))]
    for batch in shuffled[: len(train) // 64 * 64].split(64):
        mine = batch.tensor_split(launch.world_size)[launch.rank]  # this rank's part of the batch
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(images[mine]), labels[mine])
        loss.backward()  # averages the gradients of all ranks while it runs
        optimizer.step()

with torch.no_grad():
    correct = (network(images[held_out]).argmax(1) == labels[held_out]).float().mean()
if launch.rank == 0:
    print(f"{launch.world_size} ranks: {correct:.1%} of the held-out images are right")
dist.destroy_process_group()
